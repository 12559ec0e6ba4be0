// Mamba2's recurrence, arXiv:2405.21060: for each head, with dt = clamp(softplus(raw + bias)),
//
//   h = exp(-dt exp(A_log)) h + dt x B^T,   y = h C + D x   (times silu(z) where gated)
//
// x, raw, B, C and z are columns of wider rows: the row of token t of batch row b begins at
// (b T + t) width + start. The state is [B, H, P, N]; the old one is read, the new one written.
#include "gates.h"
#include "product.h"

enum { CHUNK = 64, STATE_ROWS = 16, MAPS = 128 };

typedef struct {
  const float *x, *raw, *maps_in, *maps_out, *z, *bias, *A_log, *D;
  size_t T, H, P, G, N;
  size_t x_width, raw_width, in_width, out_width, z_width;
  float low, high;
  int gated;
} ssd_inputs;

INLINE vf ssd_step_size(const ssd_inputs *in, vf raw, size_t head) {
  return clamp(softplus(raw + splat(in->bias[head])), in->low, in->high);
}

INLINE float ssd_rate(const ssd_inputs *in, size_t head) { return -one_exp(in->A_log[head]); }

// R rows of a head's state: new = old decay + inputs B^T, y = new C. `past` the caches or not.
INLINE void ssd_rows(const float *old, float *new, const float *maps_in, const float *maps_out,
                     const float *inputs, float decay, float *y, size_t N, int past, const int R) {
  vf sums[4];
  for (int r = 0; r < R; r++) sums[r] = zero();
  size_t n = 0;
  for (; n + LANES <= N; n += LANES) {
    const vf b = load_f32(maps_in + n), c = load_f32(maps_out + n);
    for (int r = 0; r < R; r++) {
      const vf h = load_f32(old + r * N + n) * splat(decay) + splat(inputs[r]) * b;
      if (past)
        stream(new + r * N + n, h);
      else
        store(new + r * N + n, h);
      sums[r] += h * c;
    }
  }
  if (n < N) {
    const vf b = load_part(maps_in + n, N - n), c = load_part(maps_out + n, N - n);
    for (int r = 0; r < R; r++) {
      const vf h = load_part(old + r * N + n, N - n) * splat(decay) + splat(inputs[r]) * b;
      store_part(new + r * N + n, h, N - n);
      sums[r] += h * c;
    }
  }
  for (int r = 0; r < R; r++) y[r] = sum(sums[r]);
}

// y + D x, times silu(z).
INLINE void ssd_outputs(const float *y, const float *x, const float *z, float skip, float *out,
                        size_t count) {
  for (size_t p = 0; p < count; p += LANES) {
    vf v = load_upto(y + p, count - p) + splat(skip) * load_upto(x + p, count - p);
    if (z) v *= silu(load_upto(z + p, count - p));
    store_upto(out + p, v, count - p);
  }
}

// One token: `rows` <= STATE_ROWS rows of the state of a head, from row p on. An inactive row keeps
// its state.
static void ssd_step_rows(const ssd_inputs *in, const float *old, float *new, float *out, size_t b,
                          size_t head, size_t p, size_t rows, int active) {
  const size_t N = in->N, group = head / (in->H / in->G), at = head * in->P + p;
  const float *x = in->x + b * in->x_width + at;
  const float *maps_in = in->maps_in + b * in->in_width + group * N;
  const float *maps_out = in->maps_out + b * in->out_width + group * N;
  const float raw = in->raw[b * in->raw_width + head];
  const float dt = ssd_step_size(in, splat(raw), head)[0];
  const float decay = active ? one_exp(dt * ssd_rate(in, head)) : 1.0f;
  float inputs[STATE_ROWS], y[STATE_ROWS];
  for (size_t i = 0; i < rows; i++) inputs[i] = active ? dt * x[i] : 0.0f;
  const int past = active && streams(new, N);
  size_t i = 0;
  for (; i + 4 <= rows; i += 4)
    if (past)
      ssd_rows(old + i * N, new + i * N, maps_in, maps_out, inputs + i, decay, y + i, N, 1, 4);
    else
      ssd_rows(old + i * N, new + i * N, maps_in, maps_out, inputs + i, decay, y + i, N, 0, 4);
  for (; i < rows; i++)
    ssd_rows(old + i * N, new + i * N, maps_in, maps_out, inputs + i, decay, y + i, N, 0, 1);
  if (!active)  // as it was, whatever the maps hold
    for (size_t n = 0; n < rows * N; n++) new[n] = old[n];
  const float *z = in->gated ? in->z + b * in->z_width + at : 0;
  ssd_outputs(y, x, z, in->D[head], out, rows);
}

#define SSD_SIZES                                                                                  \
  size_t T, size_t H, size_t P, size_t G, size_t N, size_t x_width, size_t x_start,                \
      size_t raw_width, size_t raw_start, size_t in_width, size_t in_start, size_t out_width,      \
      size_t out_start, size_t z_width, size_t z_start, size_t low, size_t high, size_t gated
#define SSD_INPUTS                                                                                 \
  {x + x_start, raw + raw_start, maps_in + in_start, maps_out + out_start, z + z_start, bias,      \
   A_log, D, T, H, P, G, N, x_width, raw_width, in_width, out_width, z_width, number(low),         \
   number(high), (int)gated}

// Tile number `tile`: `per` blocks of STATE_ROWS rows of the states of all heads of all batch rows.
EXPORT scanwright_ssd_step(const float *x, const float *raw, const float *maps_in,
                           const float *maps_out, const float *z, const float *bias,
                           const float *A_log, const float *D, const int32_t *lengths,
                           const float *state, float *y, float *new_state, size_t B, SSD_SIZES,
                           size_t per, size_t tile) {
  const ssd_inputs in = SSD_INPUTS;
  const size_t blocks = (P + STATE_ROWS - 1) / STATE_ROWS, all = B * H * blocks;
  const size_t to = tile * per + per < all ? tile * per + per : all;
  for (size_t i = tile * per; i < to; i++) {
    const size_t p = i % blocks * STATE_ROWS, head = i / blocks % H, b = i / blocks / H;
    const size_t rows = P - p < STATE_ROWS ? P - p : STATE_ROWS, row = (b * H + head) * P + p;
    ssd_step_rows(&in, state + row * N, new_state + row * N, y + row, b, head, p, rows,
                  lengths[b] > 0);
  }
  stored();
}

// wide[k][o] = w[o][k]: `count` columns of `outputs` <= BLOCK_O rows, zeros beyond the last of them.
static void turned(const float *w, float *wide, size_t stride, size_t count, size_t outputs) {
  for (size_t o = 0; o < BLOCK_O; o += LANES)
    for (size_t k = 0; k < count; k += LANES) {
      const size_t columns = count - k < LANES ? count - k : LANES;
      vf rows[LANES];
      for (size_t i = 0; i < LANES; i++)
        rows[i] = o + i < outputs ? load_upto(w + (o + i) * stride + k, columns) : zero();
      transpose(rows);
      for (size_t i = 0; i < columns; i++) store(wide + (k + i) * BLOCK_O + o, rows[i]);
    }
}

// wide[k][o] = w[k][o]: `count` rows of `outputs` <= BLOCK_O columns, zeros beyond the last of them.
static void packed(const float *w, float *wide, size_t stride, size_t count, size_t outputs) {
  for (size_t k = 0; k < count; k++)
    for (size_t o = 0; o < BLOCK_O; o += LANES) {
      vf v = zero();
      if (o < outputs) v = load_upto(w + k * stride + o, outputs - o);
      store(wide + k * BLOCK_O + o, v);
    }
}

// C B^T of every chunk, [B, chunks, G, CHUNK, CHUNK]; what is right of the diagonal may be anything.
// Tile number `tile` is one such matrix.
EXPORT scanwright_ssd_scores(const float *maps_in, const float *maps_out, const int32_t *lengths,
                             float *scores, size_t T, size_t G, size_t N, size_t in_width,
                             size_t in_start, size_t out_width, size_t out_start, size_t tile) {
  float wide[MAPS * BLOCK_O] __attribute__((aligned(64)));
  const size_t chunks = (T + CHUNK - 1) / CHUNK, group = tile % G, chunk = tile / G % chunks;
  const size_t b = tile / G / chunks, row = b * T + chunk * CHUNK;
  const size_t length = lengths[b] < 0 ? 0 : (size_t)lengths[b] > T ? T : (size_t)lengths[b];
  if (length <= chunk * CHUNK) return;
  const size_t left = length - chunk * CHUNK, count = left < CHUNK ? left : CHUNK;
  maps_in += row * in_width + in_start + group * N;
  maps_out += row * out_width + out_start + group * N;
  scores += tile * CHUNK * CHUNK;
  for (size_t j = 0; j < count; j += BLOCK_O)
    for (size_t n = 0; n < N; n += MAPS) {
      const size_t maps = N - n < MAPS ? N - n : MAPS;
      const size_t columns = count - j < BLOCK_O ? count - j : BLOCK_O;
      turned(maps_in + j * in_width + n, wide, in_width, maps, columns);
      multiply_all(maps_out + j * out_width + n, wide, scores + j * CHUNK + j, count - j, out_width,
                   maps, CHUNK, n == 0);
    }
}

// What a head's chunk is computed from: `count` tokens, sums of dt A as pairs (their difference is
// then exact to a float, however much was forgotten before), and exponentials of them.
typedef struct {
  float weights[CHUNK * CHUNK];  // [i][k]: C B^T exp(sum from k to i) dt[k], k <= i
  float sums[CHUNK], rests[CHUNK], steps[CHUNK];
  float from_start[CHUNK];  // exp(sum to i)
  float to_end[CHUNK];      // exp(sum from k to the end) dt[k]
  float total;              // exp(sum of all)
  size_t count;
} ssd_chunk;

static void ssd_decays(const ssd_inputs *in, ssd_chunk *c, size_t row, size_t head) {
  const float rate = ssd_rate(in, head);
  for (size_t k = 0; k < CHUNK; k++)
    c->steps[k] = k < c->count ? in->raw[(row + k) * in->raw_width + head] : 0;
  for (size_t k = 0; k < CHUNK; k += LANES)
    store(c->steps + k, ssd_step_size(in, load_f32(c->steps + k), head));
  double sum = 0;
  for (size_t k = 0; k < CHUNK; k++) {
    if (k < c->count) sum += (double)c->steps[k] * (double)rate;
    c->sums[k] = (float)sum;
    c->rests[k] = (float)(sum - (double)c->sums[k]);
  }
  const vf last = splat(c->sums[CHUNK - 1]), rest = splat(c->rests[CHUNK - 1]);
  for (size_t k = 0; k < CHUNK; k += LANES) {
    const vf sums = load_f32(c->sums + k), rests = load_f32(c->rests + k);
    store(c->from_start + k, faded_exp(sums));
    store(c->to_end + k, faded_exp((last - sums) + (rest - rests)) * load_f32(c->steps + k));
  }
  c->total = faded_exp(last)[0];
}

static void ssd_weights(ssd_chunk *c, const float *scores) {
  for (size_t i = 0; i < c->count; i++) {
    float *w = c->weights + i * CHUNK;
    const vf sum = splat(c->sums[i]), rest = splat(c->rests[i]);
    size_t k = 0;
    for (; k <= i; k += LANES) {
      const vf between = (sum - load_f32(c->sums + k)) + (rest - load_f32(c->rests + k));
      store(w + k, load_f32(scores + i * CHUNK + k) * faded_exp(between) * load_f32(c->steps + k));
    }
    for (size_t after = i + 1; after < k; after++) w[after] = 0;
    for (; k < CHUNK; k += LANES) store(w + k, zero());
  }
}

// One chunk of `columns` <= BLOCK_O rows of a head's state, from row p on: its outputs, and then the
// state after it.
static void ssd_chunk_rows(const ssd_inputs *in, const ssd_chunk *c, float *h, float *out,
                           size_t row, size_t head, size_t p, size_t columns) {
  float wide[MAPS * BLOCK_O] __attribute__((aligned(64)));
  float inputs[CHUNK * BLOCK_O] __attribute__((aligned(64)));
  float y[CHUNK * BLOCK_O] __attribute__((aligned(64)));
  const size_t N = in->N, at = head * in->P + p, group = head / (in->H / in->G);
  const size_t inner = in->H * in->P;
  const float *x = in->x + row * in->x_width + at;
  const float *maps_out = in->maps_out + row * in->out_width + group * N;
  packed(x, inputs, in->x_width, c->count, columns);
  for (size_t n = 0; n < N; n += MAPS) {
    const size_t maps = N - n < MAPS ? N - n : MAPS;
    turned(h + n, wide, N, maps, columns);
    multiply_all(maps_out + n, wide, y, c->count, in->out_width, maps, BLOCK_O, n == 0);
  }
  for (size_t i = 0; i < c->count; i++)
    for (size_t o = 0; o < BLOCK_O; o += LANES) {
      float *v = y + i * BLOCK_O + o;
      store(v, load_f32(v) * splat(c->from_start[i]));
    }
  for (size_t i = 0; i < c->count; i += ROWS_OF_X) {
    const size_t end = i + ROWS_OF_X < c->count ? i + ROWS_OF_X : c->count;
    multiply_all(c->weights + i * CHUNK, inputs, y + i * BLOCK_O, end - i, CHUNK, end, BLOCK_O, 0);
  }
  for (size_t i = 0; i < c->count; i++) {
    const float *z = in->gated ? in->z + (row + i) * in->z_width + at : 0;
    ssd_outputs(y + i * BLOCK_O, inputs + i * BLOCK_O, z, in->D[head], out + i * inner, columns);
  }
  // The state: h = total h + (x to_end)^T B, a block of BLOCK_O maps at a time.
  for (size_t k = 0; k < c->count; k++)
    for (size_t o = 0; o < BLOCK_O; o += LANES) {
      float *v = inputs + k * BLOCK_O + o;
      store(v, load_f32(v) * splat(c->to_end[k]));
    }
  float *weighted = y;  // [BLOCK_O][CHUNK]
  for (size_t o = 0; o < BLOCK_O; o += LANES)
    for (size_t k = 0; k < CHUNK; k += LANES) {
      vf rows[LANES];
      for (size_t i = 0; i < LANES; i++)
        rows[i] = k + i < c->count ? load_f32(inputs + (k + i) * BLOCK_O + o) : zero();
      transpose(rows);
      for (size_t i = 0; i < LANES; i++) store(weighted + (o + i) * CHUNK + k, rows[i]);
    }
  const float *maps_in = in->maps_in + row * in->in_width + group * N;
  for (size_t n = 0; n < N; n += BLOCK_O) {
    const size_t maps = N - n < BLOCK_O ? N - n : BLOCK_O;
    packed(maps_in + n, wide, in->in_width, c->count, maps);
    for (size_t o = 0; o < columns; o += ROWS_OF_X) {
      float edge[ROWS_OF_X * BLOCK_O] __attribute__((aligned(64)));
      const size_t rows = columns - o < ROWS_OF_X ? columns - o : ROWS_OF_X;
      for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < BLOCK_O; v += LANES) {
          vf old = zero();
          if (v < maps) old = load_upto(h + (o + r) * N + n + v, maps - v) * splat(c->total);
          store(edge + r * BLOCK_O + v, old);
        }
      multiply_all(weighted + o * CHUNK, wide, edge, rows, CHUNK, c->count, BLOCK_O, 0);
      for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < maps; v += LANES)
          store_upto(h + (o + r) * N + n + v, load_f32(edge + r * BLOCK_O + v), maps - v);
    }
  }
}

// Tile number `tile`: `per` heads of all heads of all batch rows, all their tokens. Outputs beyond
// a row's length are zero.
EXPORT scanwright_ssd_scan(const float *x, const float *raw, const float *maps_in,
                           const float *maps_out, const float *z, const float *bias,
                           const float *A_log, const float *D, const int32_t *lengths,
                           const float *state, const float *scores, float *y, float *new_state,
                           size_t B, SSD_SIZES, size_t per, size_t tile) {
  const ssd_inputs in = SSD_INPUTS;
  ssd_chunk c;
  const size_t all = B * H, to = tile * per + per < all ? tile * per + per : all;
  const size_t chunks = (T + CHUNK - 1) / CHUNK;
  for (size_t i = tile * per; i < to; i++) {
    const size_t head = i % H, b = i / H, group = head / (H / G);
    const size_t length = lengths[b] < 0 ? 0 : (size_t)lengths[b] > T ? T : (size_t)lengths[b];
    float *h = new_state + i * P * N;
    for (size_t n = 0; n < P * N; n++) h[n] = state[i * P * N + n];
    for (size_t t = 0; t < length; t += CHUNK) {
      const size_t row = b * T + t;
      c.count = length - t < CHUNK ? length - t : CHUNK;
      ssd_decays(&in, &c, row, head);
      ssd_weights(&c, scores + ((b * chunks + t / CHUNK) * G + group) * CHUNK * CHUNK);
      for (size_t p = 0; p < P; p += BLOCK_O) {
        const size_t columns = P - p < BLOCK_O ? P - p : BLOCK_O;
        ssd_chunk_rows(&in, &c, h + p * N, y + row * H * P + head * P + p, row, head, p, columns);
      }
    }
    for (size_t t = length; t < T; t++)
      for (size_t p = 0; p < P; p++) y[((b * T + t) * H + head) * P + p] = 0;
  }
}
