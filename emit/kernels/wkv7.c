// RWKV-7's recurrence with what stands around it in a layer (emit/ops/wkv7.py, `mixer`).
//
// A tile is a few heads. Rows of a head's state [V, K] never meet, so a block of them, turned to
// [K, rows] in the stack, goes through all valid tokens: a token is one pass over the block, which
// updates it, reads its output and what the next token removes.
#include "simd.h"

enum { WKV_DEPTH = 256, WKV_VECTORS = LANES == 8 ? 2 : 4 };

// One token of a head: y = S r of S (diag(w) + a b^T) + v k^T.
typedef struct {
  float r[WKV_DEPTH], w[WKV_DEPTH], k[WKV_DEPTH], a[WKV_DEPTH], b[WKV_DEPTH];
} wkv_token;

typedef struct {
  const float *r, *w, *k, *v, *a, *g;          // of the first token
  const float *k_k, *k_a, *r_k, *weight, *bias;  // of the head
  float *y;
  size_t tokens, D, stride;                    // valid ones; numbers from a token to the next
  int still;                                   // the only token is padding: the state stays
} wkv_head;

static void wkv_prepare(wkv_token *of, const wkv_head *head, size_t t) {
  const size_t at = t * head->stride;
  for (size_t i = 0; i < head->D; i++) {
    of->r[i] = head->r[at + i];
    of->w[i] = head->w[at + i];
    of->k[i] = head->k[at + i] * (1.0f + (head->a[at + i] - 1.0f) * head->k_a[i]);
    of->a[i] = head->k[at + i] * head->k_k[i];
  }
  const float square = dot(of->a, of->a, head->D);
  const float scale = 1.0f / __builtin_sqrtf(square < 1e-24f ? 1e-24f : square);
  for (size_t i = 0; i < head->D && head->still; i++) {
    of->w[i] = 1.0f;
    of->k[i] = of->a[i] = 0.0f;
  }
  for (size_t i = 0; i < head->D; i++) {
    const float kappa = of->a[i] * scale;
    of->a[i] = -kappa;
    of->b[i] = kappa * head->a[at + i];
  }
}

// Rows `first` … `first` + LANES - 1 of the state as lanes of block[k]; rows from D on are zeros.
static void wkv_turn(const float *state, float *block, size_t width, size_t first, size_t D) {
  for (size_t k = 0; k < D; k += LANES) {
    vf rows[LANES];
    for (size_t i = 0; i < LANES; i++) {
      const float *from = state + (first + i) * D + k;
      rows[i] = first + i >= D ? zero() : k + LANES <= D ? load_f32(from) : load_part(from, D - k);
    }
    transpose(rows);
    for (size_t i = 0; i < LANES && k + i < D; i++) store(block + (k + i) * width, rows[i]);
  }
}

static void wkv_turn_back(const float *block, float *state, size_t width, size_t first, size_t D) {
  for (size_t k = 0; k < D; k += LANES) {
    vf rows[LANES];
    for (size_t i = 0; i < LANES; i++)
      rows[i] = k + i < D ? load_f32(block + (k + i) * width) : zero();
    transpose(rows);
    for (size_t i = 0; i < LANES && first + i < D; i++) {
      float *to = state + (first + i) * D + k;
      if (k + LANES <= D) store(to, rows[i]);
      else store_part(to, rows[i], D - k);
    }
  }
}

// One token, of which `u` = S a is known; then u is that of the next, unless there is none.
INLINE void wkv_pass(const wkv_token *of, const wkv_token *next, float *block, size_t D, vf *u,
                     const vf *v, vf *y, const int N) {
  vf following[WKV_VECTORS];
  for (int n = 0; n < N; n++) y[n] = following[n] = zero();
  for (size_t k = 0; k < D; k++) {
    const vf w = splat(of->w[k]), b = splat(of->b[k]), key = splat(of->k[k]), r = splat(of->r[k]);
    for (int n = 0; n < N; n++) {
      float *at = block + (k * N + n) * LANES;
      const vf now = load_f32(at) * w + u[n] * b + v[n] * key;
      store(at, now);
      y[n] += now * r;
      if (next) following[n] += now * splat(next->a[k]);
    }
  }
  for (int n = 0; n < N; n++) u[n] = following[n];
}

// Rows `first` … of N vectors through all tokens.
INLINE void wkv_rows(const wkv_head *head, const float *state, float *new, size_t first,
                     const int N) {
  float block[WKV_DEPTH * WKV_VECTORS * LANES];
  wkv_token tokens[2];
  vf u[WKV_VECTORS], v[WKV_VECTORS], y[WKV_VECTORS];
  const size_t D = head->D, width = (size_t)N * LANES;
  for (int n = 0; n < N; n++) {
    wkv_turn(state, block + n * LANES, width, first + n * LANES, D);
    u[n] = zero();
  }
  wkv_prepare(tokens, head, 0);
  for (size_t k = 0; k < D; k++)
    for (int n = 0; n < N; n++)
      u[n] += load_f32(block + (k * N + n) * LANES) * splat(tokens[0].a[k]);
  for (size_t t = 0; t < head->tokens; t++) {
    wkv_token *next = t + 1 < head->tokens ? tokens + (t + 1) % 2 : 0;
    const size_t at = t * head->stride + first;
    if (next) wkv_prepare(next, head, t + 1);
    for (int n = 0; n < N; n++) {
      const size_t row = first + n * LANES;
      v[n] = row + LANES <= D ? load_f32(head->v + at + n * LANES)
                              : load_part(head->v + at + n * LANES, row < D ? D - row : 0);
    }
    if (next) wkv_pass(tokens + t % 2, next, block, D, u, v, y, N);
    else wkv_pass(tokens + t % 2, 0, block, D, u, v, y, N);
    for (int n = 0; n < N; n++) {
      const size_t row = first + n * LANES;
      if (row + LANES <= D) store(head->y + at + n * LANES, y[n]);
      else store_part(head->y + at + n * LANES, y[n], row < D ? D - row : 0);
    }
  }
  for (int n = 0; n < N; n++)
    wkv_turn_back(block + n * LANES, new, width, first + n * LANES, D);
}

// y <- g (norm(y) weight + bias + (sum of r k r_k) v), a head of a token.
static void wkv_norm(const wkv_head *head, size_t t, float eps) {
  const size_t D = head->D, at = t * head->stride;
  const float *k = head->k + at, *a = head->a + at, *r = head->r + at;
  const float *v = head->v + at;
  float *y = head->y + at, one[WKV_DEPTH], asked[WKV_DEPTH];
  for (size_t i = 0; i < D; i++) {
    one[i] = 1.0f;
    asked[i] = r[i] * head->r_k[i] * (1.0f + (a[i] - 1.0f) * head->k_a[i]);
  }
  const float mean = dot(y, one, D) / (float)D, own = dot(asked, k, D);
  for (size_t i = 0; i < D; i++) y[i] -= mean;
  const float scale = 1.0f / __builtin_sqrtf(dot(y, y, D) / (float)D + eps);
  for (size_t i = 0; i < D; i++)
    y[i] = head->g[at + i] * (y[i] * scale * head->weight[i] + head->bias[i] + own * v[i]);
}

// r, w (the decay itself), k, v, a and g [B, T, H D]; k_k … bias [H D]; lengths i32[B]; state
// [B, H, D, D] -> y [B, T, H D], zeros beyond a row's length where T > 1, and new like state; `per` heads a tile,
// eps as bits of a float.
EXPORT scanwright_wkv7(const float *r, const float *w, const float *k, const float *v,
                       const float *a, const float *g, const float *k_k, const float *k_a,
                       const float *r_k, const float *weight, const float *bias,
                       const int32_t *lengths, const float *state, float *y, float *new, size_t B,
                       size_t T, size_t H, size_t D, size_t eps, size_t per, size_t tile) {
  const union { uint32_t u; float f; } small = {(uint32_t)eps};
  const size_t to = (tile + 1) * per < B * H ? (tile + 1) * per : B * H;
  for (size_t unit = tile * per; unit < to; unit++) {
    const size_t b = unit / H, h = unit % H * D, at = b * T * H * D + h;
    const size_t given = lengths[b] > 0 ? (size_t)lengths[b] : 0;
    const size_t tokens = T == 1 || given > T ? T : given;
    const wkv_head head = {r + at,   w + at,   k + at,   v + at,     a + at,   g + at, k_k + h,
                           k_a + h,  r_k + h,  weight + h, bias + h, y + at, tokens, D, H * D,
                           given == 0};
    const float *from = state + unit * D * D;
    size_t row = 0;
    for (; tokens && row + WKV_VECTORS * LANES <= D; row += WKV_VECTORS * LANES)
      wkv_rows(&head, from, new + unit * D * D, row, WKV_VECTORS);
    for (; tokens && row < D; row += LANES) wkv_rows(&head, from, new + unit * D * D, row, 1);
    for (size_t i = 0; given == 0 && i < D * D; i++) new[unit * D * D + i] = from[i];
    for (size_t t = 0; t < T; t++)
      if (t < tokens) wkv_norm(&head, t, small.f);
      else
        for (size_t i = 0; i < D; i++) head.y[t * H * D + i] = 0.0f;
  }
}
