// The few calls of llama.cpp that peers.py needs, with plain types: its structures differ from
// version to version, so this is compiled against the headers of the version that is loaded.

#include <stdlib.h>

#include "ggml-backend.h"
#include "llama.h"

struct peer {
    struct llama_model *model;
    struct llama_context *context;
    struct llama_batch batch;
};

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}

// Loads the code for this processor from `directory`. 0 if the library is not that of the headers.
int peer_start(const char *directory) {
    llama_log_set(silent, NULL);
    ggml_backend_load_all_from_path(directory);
    llama_backend_init();
    struct llama_context_params context = llama_context_default_params();
    struct llama_model_quantize_params quantize = llama_model_quantize_default_params();
    return context.n_ctx == 512 && context.n_ubatch == 512 && context.n_seq_max == 1 &&
           context.type_k == GGML_TYPE_F16 && context.offload_kqv && context.samplers == NULL &&
           quantize.quantize_output_tensor && !quantize.pure && quantize.imatrix == NULL;
}

const char *peer_system(void) { return llama_print_system_info(); }

// `type` is one of enum llama_ftype. 0 on success.
int peer_quantize(const char *from, const char *to, int type, int threads) {
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (enum llama_ftype)type;
    params.nthread = threads;
    return (int)llama_model_quantize(from, to, &params);
}

// `sequences` independent ones of at most `length` tokens. `wide`: attention and its cache in f32,
// which are f16 by default.
struct peer *peer_open(const char *path, int length, int sequences, int threads, int wide) {
    struct peer *peer = calloc(1, sizeof *peer);
    struct llama_context_params params = llama_context_default_params();
    peer->model = llama_model_load_from_file(path, llama_model_default_params());
    if (peer->model == NULL) return NULL;
    params.n_ctx = (uint32_t)(length * sequences);
    params.n_seq_max = (uint32_t)sequences;
    params.n_threads = params.n_threads_batch = threads;
    if (wide) {
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    peer->context = llama_init_from_model(peer->model, params);
    if (peer->context == NULL) return NULL;
    peer->batch = llama_batch_init((int32_t)llama_n_batch(peer->context), 0, 1);
    return peer;
}

int peer_vocabulary(struct peer *peer) {
    return llama_vocab_n_tokens(llama_model_get_vocab(peer->model));
}

void peer_clear(struct peer *peer) { llama_memory_clear(llama_get_memory(peer->context), true); }

// `count` tokens of each sequence, the first of them at `position`: tokens[sequences][count].
// Logits are wanted of the last token of each. 0 on success.
int peer_eval(struct peer *peer, const int *tokens, int count, int position, int sequences) {
    struct llama_batch *batch = &peer->batch;
    batch->n_tokens = count * sequences;
    for (int i = 0; i < batch->n_tokens; i++) {
        batch->token[i] = tokens[i];
        batch->pos[i] = position + i % count;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = i / count;
        batch->logits[i] = i % count == count - 1;
    }
    return llama_decode(peer->context, *batch);
}

// The logits of token `index` of the last batch, once they are computed.
const float *peer_logits(struct peer *peer, int index) {
    return llama_get_logits_ith(peer->context, index);
}
