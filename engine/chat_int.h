/* Inside of the chat encoding: messages in the OpenAI shape to the text that the model was trained on.
 *
 *   chat_read.c     JSON to messages, every shape checked; tool and user messages merge into user turns (P1)
 *   chat_prepare.c  order of results (P2), drop_thinking (P3), what is dropped (P4)
 *   chat_render.c   messages to text with marks
 *   chat_prompt.c   text with marks to ids
 *
 * All texts are borrowed from the JSON document of the talk. */
#ifndef DM_ENGINE_CHAT_INT_H
#define DM_ENGINE_CHAT_INT_H

#include "engine/engine.h"
#include "engine/pyjson_int.h"

typedef enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_DEVELOPER, CHAT_ASSISTANT, CHAT_TOOL, CHAT_REMINDER } chat_role;

typedef struct chat_block { /* part of a user turn */
    bool result;           /* of a tool */
    const pj_val *content; /* string, list of parts, or NULL */
    const pj_val *id;      /* result: tool_call_id or NULL */
    int64_t order;         /* P2 */
} chat_block;

typedef struct chat_msg {
    chat_role role;         /* never CHAT_TOOL: these are blocks of user turns */
    uint32_t number;        /* index of its (first) message in the input, for errors */
    const pj_val *content;  /* not of users; NULL: empty */
    size_t first_block, nblocks;     /* users */
    const pj_val *reasoning;         /* NULL: none */
    const pj_val *calls;             /* list of at least one, or NULL */
    const pj_val *tools;             /* list of at least one, or NULL */
    const pj_val *response_format;   /* or NULL */
    const char *task;                /* one of chat_tasks, or NULL */
    bool wo_eos;
} chat_msg;

typedef struct chat_talk {
    pj_doc doc;
    chat_msg *msgs;     /* owned */
    size_t n;
    chat_block *blocks; /* owned; those of one turn lie together */
    size_t nblocks;
    bool any_tools;     /* some message, of whatever role, brings tools */
    bool drop_thinking;
    int64_t last;       /* index of the last user or developer message, -1: none */
} chat_talk;

/* "action" comes first: it alone keeps the assistant marker. */
extern const char *const chat_tasks[];

int chat_read(chat_talk *t, const char *json, size_t n, dm_err *e);
int chat_prepare(chat_talk *t, const dm_chat_opts *o); /* only DM_ENOMEM */
void chat_free(chat_talk *t);

#endif
