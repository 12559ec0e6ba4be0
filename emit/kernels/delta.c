// The gated delta rule with what stands around it in a layer (emit/ops/delta.py, `mixer`).
//
// A tile is a few heads of one row or of neighbours. Columns of a head's state [K, V] never meet, so
// a block of them goes through all T tokens at a time, kept in the stack: a token is one pass over
// the block, which adds what the token before writes and reads what this one asks for. With one
// token (a decode) the state is read from where it lies and written to where it belongs.
#include "simd.h"

enum { DELTA_KEYS = 512, DELTA_BLOCK = 12288 };  // floats of a key, and of a block of the state

// One token of a head: keys and queries are of length 1 and 1 / sqrt(K).
typedef struct {
  float key[DELTA_KEYS], decay[DELTA_KEYS];              // k, exp(g)
  float by_key[DELTA_KEYS], by_query[DELTA_KEYS];        // k exp(g), q exp(g)
  float pair, beta;                                      // q k
  int still;                                             // padding: the state stays as it is
} delta_token;

static void delta_prepare(delta_token *of, const float *q, const float *k, const float *decay,
                          float beta, size_t K, size_t channels) {
  const float to_query = 1.0f / __builtin_sqrtf((dot(q, q, K) + 1e-6f) * (float)K);
  const float to_key = 1.0f / __builtin_sqrtf(dot(k, k, K) + 1e-6f);
  int same = 1;
  for (size_t i = 0; i < K; i++) {
    const float kept = decay[channels == 1 ? 0 : i];
    of->key[i] = k[i] * to_key;
    of->decay[i] = kept;
    of->by_key[i] = of->key[i] * kept;
    of->by_query[i] = q[i] * to_query * kept;
  }
  for (size_t i = 0; i < channels; i++) same &= decay[i] == 1.0f;
  of->pair = dot(q, k, K) * to_query * to_key;
  of->beta = beta;
  of->still = same && beta == 0.0f;
}

// `count` rows of a block of N vectors, the last one of `last` lanes (LANES: it is whole).
#define DELTA_LOAD(p, n) ((n) == N - 1 && last < LANES ? load_part(p, last) : load_f32(p))
#define DELTA_STORE(p, x, n)                                   \
  do {                                                         \
    if ((n) == N - 1 && last < LANES) store_part(p, x, last);  \
    else store(p, x);                                          \
  } while (0)

// What the decayed state gives for the key and for the query.
INLINE void delta_read(const delta_token *of, const float *from, size_t stride, size_t K,
                       vf *by_key, vf *by_query, const int N, const size_t last) {
  for (int n = 0; n < N; n++) by_key[n] = by_query[n] = zero();
  for (size_t i = 0; i < K; i++) {
    const vf key = splat(of->by_key[i]), query = splat(of->by_query[i]);
    for (int n = 0; n < N; n++) {
      const vf old = DELTA_LOAD(from + i * stride + n * LANES, n);
      by_key[n] += key * old;
      by_query[n] += query * old;
    }
  }
}

// The state after a token that writes u, and, unless `next` is none, what that one reads of it.
INLINE void delta_write(const delta_token *of, const delta_token *next, const vf *u,
                        const float *from, size_t stride, float *to, size_t to_stride, size_t K,
                        vf *by_key, vf *by_query, const int N, const size_t last) {
  if (next)
    for (int n = 0; n < N; n++) by_key[n] = by_query[n] = zero();
  for (size_t i = 0; i < K; i++) {
    const vf decay = splat(of->decay[i]), key = splat(of->key[i]);
    for (int n = 0; n < N; n++) {
      const vf old = DELTA_LOAD(from + i * stride + n * LANES, n);
      const vf now = of->still ? old : old * decay + key * u[n];
      DELTA_STORE(to + i * to_stride + n * LANES, now, n);
      if (next) {
        by_key[n] += splat(next->by_key[i]) * now;
        by_query[n] += splat(next->by_query[i]) * now;
      }
    }
  }
}

typedef struct {
  const float *q, *k, *v, *decay, *beta;  // of the first token
  float *y;
  size_t T, K, channels;
  size_t inputs, decays, betas, outputs;  // numbers from a token to the next
} delta_head;

INLINE void delta_block(const delta_head *head, const float *state, float *new, size_t V,
                        size_t column, const int N, const size_t last) {
  float block[DELTA_BLOCK];
  delta_token tokens[2];
  vf by_key[8], by_query[8], u[8];
  const size_t T = head->T, K = head->K, width = (size_t)N * LANES;
  const float *from = state + column;
  size_t stride = V;
  delta_prepare(tokens, head->q, head->k, head->decay, head->beta[0], K, head->channels);
  delta_read(tokens, from, stride, K, by_key, by_query, N, last);
  for (size_t t = 0; t < T; t++) {
    const delta_token *of = tokens + t % 2;
    delta_token *next = t + 1 < T ? tokens + (t + 1) % 2 : 0;
    if (next)
      delta_prepare(next, head->q + (t + 1) * head->inputs, head->k + (t + 1) * head->inputs,
                    head->decay + (t + 1) * head->decays, head->beta[(t + 1) * head->betas], K,
                    head->channels);
    const float *v = head->v + t * head->inputs + column;
    float *y = head->y + t * head->outputs + column;
    for (int n = 0; n < N; n++) {
      u[n] = splat(of->beta) * (DELTA_LOAD(v + n * LANES, n) - by_key[n]);
      DELTA_STORE(y + n * LANES, by_query[n] + splat(of->pair) * u[n], n);
    }
    if (next)
      delta_write(of, next, u, from, stride, block, width, K, by_key, by_query, N, last);
    else
      delta_write(of, 0, u, from, stride, new + column, V, K, by_key, by_query, N, last);
    from = block;
    stride = width;
  }
}

// y <- y / sqrt(mean(y²) + eps) weight gate(z), a head of a token.
static void delta_norm(float *y, const float *z, const float *weight, size_t V, float eps,
                       int silu) {
  const float scale = 1.0f / __builtin_sqrtf(dot(y, y, V) / (float)V + eps);
  for (size_t i = 0; i < V; i += LANES) {
    const size_t count = V - i < LANES ? V - i : LANES;
    const int whole = count == LANES;
    const vf gate = whole ? load_f32(z + i) : load_part(z + i, count);
    const vf of_y = whole ? load_f32(y + i) : load_part(y + i, count);
    const vf by = whole ? load_f32(weight + i) : load_part(weight + i, count);
    vf out = of_y * splat(scale) * by * vsigmoid(gate);
    if (silu) out *= gate;
    if (whole) store(y + i, out);
    else store_part(y + i, out, count);
  }
}

// Columns of a block: as many vectors as registers and the stack have room for.
#define DELTA_WIDE (LANES == 8 ? 4 : 8)
static void delta_columns(const delta_head *head, const float *state, float *new, size_t V) {
  const size_t room = head->T > 1 ? DELTA_BLOCK / head->K / LANES : DELTA_WIDE;
  size_t c = 0;
  if (room >= DELTA_WIDE && head->T == 1)
    for (; c + DELTA_WIDE * LANES <= V; c += DELTA_WIDE * LANES)
      delta_block(head, state, new, V, c, DELTA_WIDE, LANES);
  if (room >= 4)
    for (; c + 4 * LANES <= V; c += 4 * LANES) delta_block(head, state, new, V, c, 4, LANES);
  for (; c + LANES <= V; c += LANES) delta_block(head, state, new, V, c, 1, LANES);
  if (c < V) delta_block(head, state, new, V, c, 1, V - c);
}

// qkv [B, T, 2 G K + H V], z [B, T, H V], decay [B, T, H, channels], beta [B, T, H], weight [V],
// state [B, H, K, V] -> y [B, T, H V], new like state; `per` heads a tile; eps as bits of a float.
EXPORT scanwright_delta(const float *qkv, const float *z, const float *decay, const float *beta,
                        const float *weight, const float *state, float *y, float *new, size_t B,
                        size_t T, size_t G, size_t H, size_t K, size_t V, size_t channels,
                        size_t silu, size_t eps, size_t per, size_t tile) {
  const union { uint32_t u; float f; } small = {(uint32_t)eps};
  const size_t width = 2 * G * K + H * V, heads = B * H;
  const size_t to = (tile + 1) * per < heads ? (tile + 1) * per : heads;
  for (size_t at = tile * per; at < to; at++) {
    const size_t b = at / H, h = at % H, g = h / (H / G);
    const float *in = qkv + b * T * width;
    const delta_head head = {in + g * K,
                             in + (G + g) * K,
                             in + 2 * G * K + h * V,
                             decay + (b * T * H + h) * channels,
                             beta + b * T * H + h,
                             y + (b * T * H + h) * V,
                             T, K, channels, width, H * channels, H, H * V};
    delta_columns(&head, state + at * K * V, new + at * K * V, V);
    for (size_t t = 0; t < T; t++)
      delta_norm(head.y + t * H * V, z + ((b * T + t) * H + h) * V, weight, V, small.f, (int)silu);
  }
}
