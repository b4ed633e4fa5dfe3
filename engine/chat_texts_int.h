/* Fixed texts of the prompt, and the added tokens that the template writes. */
#ifndef DM_ENGINE_CHAT_TEXTS_INT_H
#define DM_ENGINE_CHAT_TEXTS_INT_H

#define MARK_BOS "<｜begin▁of▁sentence｜>"
#define MARK_EOS "<｜end▁of▁sentence｜>"
#define MARK_USER "<｜User｜>"
#define MARK_ASSISTANT "<｜Assistant｜>"
#define MARK_REMINDER "<｜latest_reminder｜>"
#define MARK_THINK "<think>"
#define MARK_THINK_END "</think>"
#define MARK_DSML "｜DSML｜"

extern const char chat_tools_head[]; /* up to the schemas, one per line */
extern const char chat_tools_tail[]; /* behind the last schema's line break; ends with one itself */
extern const char chat_response_format[];
extern const char chat_effort_absolute[]; /* both end with an empty line */
extern const char chat_effort_beyond[];

#endif
