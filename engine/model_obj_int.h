/* model_obj_int.h — the opened model itself, for the files that make it, describe it and hash it. */
#ifndef DM_MODEL_OBJ_INT_H
#define DM_MODEL_OBJ_INT_H

#include "engine/model_tensors_int.h"
#include "engine/safetensors_int.h"

typedef struct model_copy { /* a tensor that lay misaligned in its file */
    struct model_copy *next;
    _Alignas(64) uint8_t data[];
} model_copy;

struct dm_model {
    char *dir;
    dm_config config;
    st_file *shard;       /* [nshards] */
    char **shard_name;    /* [nshards] file names inside dir */
    int nshards;
    model_tensor *tensor; /* [ntensors] in bytewise order of names */
    size_t ntensors;
    size_t nused;         /* those that the configuration calls for; the others are ignored */
    bool *used;           /* [ntensors] */
    model_table table;
    model_copy *copies;
};

#endif
