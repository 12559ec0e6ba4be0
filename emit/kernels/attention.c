// Softmax attention of queries over keys and values [B, G, C, D] as they lie (emit/ops/attention.py).
//
// Token t of row b sees the places before positions[b] + t + 1, and nothing else is read; or those of
// the last `window` positions in a ring, and tokens not written yet. A block of queries goes over the
// places in blocks, with a running maximum: sums so far are scaled down where a larger score comes. Few queries (a decode): lanes along D for the scores. Many: a block of keys is
// transposed into the stack, and both products are those of product.h.
#include "gates.h"
#include "product.h"

enum { ATT_DEPTH = 640, ATT_FEW = 8, ATT_ROWS = 48, ATT_PLACES = 64, ATT_KEYS = 64 };
enum { ATT_ROOM = 12 * ATT_DEPTH };  // floats of a block's queries, and of its outputs

typedef struct {
  float q[ATT_ROOM], y[ATT_ROOM];           // rows of `width` floats, queries scaled
  float scores[ATT_ROWS * ATT_PLACES];      // rows of ATT_PLACES
  float largest[ATT_ROWS], total[ATT_ROWS]; // of the scores so far, and of their exponentials
  size_t low[ATT_ROWS], limit[ATT_ROWS];    // the first place that a row sees, and that after the last
  size_t rows, width, D, W;                 // numbers of a key, and of a value that are wanted
  float cap;
} att_block;

// The scores of a row with `count` places from `start` become exponentials; of places that it does
// not see, 0. What is summed so far is to be multiplied with the result.
static float att_weigh(att_block *of, size_t row, size_t start, size_t count, size_t width) {
  float *scores = of->scores + row * ATT_PLACES, lanes[LANES], most = of->largest[row];
  const size_t end = of->limit[row] > start ? of->limit[row] - start : 0;
  const size_t begin = of->low[row] > start ? of->low[row] - start : 0;
  const vf after = splat((float)(end < count ? end : count));
  const vf before = splat((float)(begin < count ? begin : count));
  for (int i = 0; i < LANES; i++) lanes[i] = (float)i;
  vf top = splat(most), total = zero();
  for (size_t i = 0; i < width; i += LANES) {
    vf s = load_f32(scores + i);
    if (of->cap > 0.0f) {  // cap tanh(s / cap), where tanh x = 2 sigmoid(2 x) - 1
      s = splat(of->cap) * (splat(2.0f) * vsigmoid(s * splat(2.0f / of->cap)) - splat(1.0f));
      store(scores + i, s);
    }
    const vf place = load_f32(lanes) + splat((float)i);
    const vi inside = (place < after) & (place >= before);
    top = choose(inside & (s > top), s, top);
  }
  for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
  for (size_t i = 0; i < width; i += LANES) {
    const vf place = load_f32(lanes) + splat((float)i);
    const vi inside = (place < after) & (place >= before);
    const vf weight = choose(inside, vexp(load_f32(scores + i) - splat(most)), zero());
    store(scores + i, weight);
    total += weight;
  }
  const float kept = vexp(splat(of->largest[row] - most))[0];
  of->largest[row] = most;
  of->total[row] = of->total[row] * kept + sum(total);
  return kept;
}

// All rows of a block's scores, and the outputs so far made smaller.
static void att_weigh_all(att_block *of, size_t start, size_t count, size_t width) {
  for (size_t m = 0; m < of->rows; m++) {
    const float kept = att_weigh(of, m, start, count, width);
    if (kept != 1.0f)
      for (size_t i = 0; i < of->width; i += LANES)
        store(of->y + m * of->width + i, load_f32(of->y + m * of->width + i) * splat(kept));
  }
}

// Few queries: scores of one with up to LANES keys.
static void att_score(const att_block *of, size_t row, const float *keys, size_t count,
                      float *scores) {
  const float *q = of->q + row * of->width, *key[LANES];
  vf all[LANES];
  for (size_t i = 0; i < LANES; i++) {
    key[i] = keys + (i < count ? i : count - 1) * of->D;
    all[i] = zero();
  }
  size_t d = 0;
  for (; d + LANES <= of->D; d += LANES) {
    const vf query = load_f32(q + d);
    for (int i = 0; i < LANES; i++) all[i] += query * load_f32(key[i] + d);
  }
  if (d < of->D)
    for (int i = 0; i < LANES; i++) all[i] += load_f32(q + d) * load_part(key[i] + d, of->D - d);
  store(scores, sums(all));
}

// Few queries: y[M rows][N vectors] += weights of `count` places with their values.
INLINE void att_add(att_block *of, size_t row, const float *values, size_t count, size_t column,
                    const int M, const int N) {
  vf acc[4][4];
  float *y = of->y + row * of->width + column;
  const float *weights = of->scores + row * ATT_PLACES;
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) acc[m][n] = load_f32(y + m * of->width + n * LANES);
  for (size_t c = 0; c < count; c++) {
    vf value[4];
    for (int n = 0; n < N; n++)
      value[n] = N > 1 ? load_f32(values + c * of->D + column + n * LANES)
                       : load_upto(values + c * of->D + column, of->W - column);
    for (int m = 0; m < M; m++) {
      const vf weight = splat(weights[m * ATT_PLACES + c]);
      for (int n = 0; n < N; n++) acc[m][n] += weight * value[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(y + m * of->width + n * LANES, acc[m][n]);
}

INLINE void att_add_rows(att_block *of, const float *values, size_t count, size_t column,
                         const int N) {
  enum { TOGETHER_ROWS = LANES == 8 ? 2 : 4 };
  size_t m = 0;
  for (; m + TOGETHER_ROWS <= of->rows; m += TOGETHER_ROWS)
    att_add(of, m, values, count, column, TOGETHER_ROWS, N);
  for (; m < of->rows; m++) att_add(of, m, values, count, column, 1, N);
}

static void att_few(att_block *of, const float *keys, const float *values, size_t from, size_t to) {
  for (size_t start = from; start < to; start += ATT_PLACES) {
    const size_t count = to - start < ATT_PLACES ? to - start : ATT_PLACES;
    size_t width = 0, column = 0;
    for (; width < count; width += LANES)
      for (size_t m = 0; m < of->rows; m++)
        att_score(of, m, keys + (start + width) * of->D, count - width,
                  of->scores + m * ATT_PLACES + width);
    att_weigh_all(of, start, count, width);
    for (; column + 4 * LANES <= of->W; column += 4 * LANES)
      att_add_rows(of, values + start * of->D, count, column, 4);
    for (; column < of->W; column += LANES)
      att_add_rows(of, values + start * of->D, count, column, 1);
  }
}

// wide[d][place] = keys[place][d] of `depth` numbers; zeros for places beyond `count`.
static void att_turn(const float *keys, size_t stride, size_t depth, size_t count, float *wide) {
  for (size_t c = 0; c < BLOCK_O; c += LANES) {
    for (size_t d = 0; d < depth; d += LANES) {
      vf rows[LANES];
      for (size_t i = 0; i < LANES; i++)
        rows[i] = c + i < count ? load_upto(keys + (c + i) * stride + d, depth - d) : zero();
      transpose(rows);
      for (size_t i = 0; i < LANES && d + i < depth; i++)
        store(wide + (d + i) * BLOCK_O + c, rows[i]);
    }
  }
}

// All of a block's queries with `all` keys, one each `stride` floats, the first of which is place
// `base`.
static void att_many(att_block *of, const float *keys, const float *values, size_t stride,
                     size_t base, size_t all) {
  float wide[ATT_KEYS * BLOCK_O];
  for (size_t start = 0; start < all; start += BLOCK_O) {
    const size_t count = all - start < BLOCK_O ? all - start : BLOCK_O;
    for (size_t d = 0; d < of->D; d += ATT_KEYS) {
      const size_t depth = of->D - d < ATT_KEYS ? of->D - d : ATT_KEYS;
      att_turn(keys + start * stride + d, stride, depth, count, wide);
      multiply_all(of->q + d, wide, of->scores, of->rows, of->width, depth, ATT_PLACES, d == 0);
    }
    att_weigh_all(of, base + start, count, BLOCK_O);
    for (size_t column = 0; column < of->W; column += BLOCK_O) {
      for (size_t c = 0; c < count; c++)
        for (size_t i = 0; i < BLOCK_O; i += LANES) {
          const float *from = values + (start + c) * stride + column + i;
          const size_t left = column + i < of->W ? of->W - column - i : 0;
          store(wide + c * BLOCK_O + i, left ? load_upto(from, left) : zero());
        }
      multiply_all(of->scores, wide, of->y + column, of->rows, ATT_PLACES, count, of->width, 0);
    }
  }
}

typedef struct {
  size_t T, H, G, C, D, W;
  float scale, cap;
  size_t window;  // 0 without one
} att_sizes;

// Queries `first` … of the T H / G that read the keys of head g of row b; true if any is valid.
static int att_open(att_block *of, const att_sizes *n, const float *q, size_t b, size_t g,
                    size_t first, size_t most, size_t unit, int length, int position) {
  const size_t shared = n->H / n->G, all = n->T * shared;
  const size_t valid = length > 0 ? (size_t)length * shared : 0;
  const size_t end = first + most < all ? first + most : all;
  of->width = (n->D + unit - 1) / unit * unit;
  of->D = n->D;
  of->W = n->W;
  of->cap = n->cap;
  of->rows = end - first;
  for (size_t m = 0; m < of->rows; m++) {
    const size_t t = (first + m) / shared, h = g * shared + (first + m) % shared;
    const float *from = q + ((b * n->T + t) * n->H + h) * n->D;
    const long long seen = (long long)position + (long long)t + 1;
    for (size_t d = 0; d < of->width; d++) {
      of->q[m * of->width + d] = d < n->D ? from[d] * n->scale : 0.0f;
      of->y[m * of->width + d] = 0.0f;
    }
    of->largest[m] = -1e30f;
    of->total[m] = 0.0f;
    of->limit[m] = seen < 0 ? 0 : (size_t)seen;
    of->low[m] = n->window && of->limit[m] > n->window ? of->limit[m] - n->window : 0;
    if (!n->window && of->limit[m] > n->C) of->limit[m] = n->C;
    if (first + m >= valid) of->limit[m] = 0;
  }
  return first < valid;
}

// How many places any row of the block sees.
static size_t att_end(const att_block *of) {
  size_t end = 0;
  for (size_t m = 0; m < of->rows; m++) end = of->limit[m] > end ? of->limit[m] : end;
  return end;
}

// The outputs, divided by `total` where `whole`; of padding, zeros. `stride` from a head to the next.
static void att_close(const att_block *of, const att_sizes *n, float *y, size_t b, size_t g,
                      size_t first, size_t stride, int whole) {
  const size_t shared = n->H / n->G;
  for (size_t m = 0; m < of->rows; m++) {
    const size_t t = (first + m) / shared, h = g * shared + (first + m) % shared;
    float *to = y + ((b * n->T + t) * n->H + h) * stride;
    const float by = !whole ? 1.0f : of->total[m] == 0.0f ? 0.0f : 1.0f / of->total[m];
    for (size_t i = 0; i < n->W; i++) to[i] = of->y[m * of->width + i] * by;
  }
}

// One token a row, padding too. q [B, H, D], keys and values [B, G, C, D], positions i32[B] ->
// y [B, H, W], the first W numbers of the values. With `splits` > 1 a tile reads a part of the places,
// and y [B, H, splits, W] and stats [B, H, splits, 2] are for att_join.
static void att_step(const float *q, const float *keys, const float *values,
                     const int32_t *positions, float *y, float *stats, const att_sizes *n,
                     size_t splits, size_t unit) {
  att_block of;
  const size_t blocks = (n->H / n->G + ATT_FEW - 1) / ATT_FEW;
  const size_t split = unit % splits, first = unit / splits % blocks * ATT_FEW;
  const size_t g = unit / splits / blocks % n->G, b = unit / splits / blocks / n->G;
  const size_t region = (b * n->G + g) * n->C * n->D;
  if (att_open(&of, n, q, b, g, first, ATT_FEW, LANES, 1, positions[b])) {
    const size_t end = att_end(&of), each = (end + splits - 1) / splits;
    const size_t per = (each + ATT_PLACES - 1) / ATT_PLACES * ATT_PLACES;
    const size_t to = (split + 1) * per < end ? (split + 1) * per : end;
    att_few(&of, keys + region, values + region, split * per, to);
  }
  if (!stats) return att_close(&of, n, y, b, g, first, n->W, 1);
  att_close(&of, n, y + split * n->W, b, g, first, splits * n->W, 0);
  for (size_t m = 0; m < of.rows; m++) {
    float *to = stats + ((b * n->H + g * (n->H / n->G) + first + m) * splits + split) * 2;
    to[0] = of.largest[m];
    to[1] = of.total[m];
  }
}

EXPORT scanwright_attention_step(const float *q, const float *keys, const float *values,
                                 const int32_t *positions, float *y, size_t units, size_t H, size_t G, size_t C, size_t D, size_t W,
                                 size_t scale, size_t cap, size_t tiles, size_t tile) {
  const att_sizes n = {1, H, G, C, D, W, number(scale), number(cap), 0};
  for (size_t unit = tile; unit < units; unit += tiles)
    att_step(q, keys, values, positions, y, 0, &n, 1, unit);
}

EXPORT scanwright_attention_part(const float *q, const float *keys, const float *values,
                                 const int32_t *positions, float *y, float *stats, size_t units,
                                 size_t H, size_t G, size_t C, size_t D,
                                 size_t W, size_t scale, size_t cap, size_t splits, size_t tiles,
                                 size_t tile) {
  const att_sizes n = {1, H, G, C, D, W, number(scale), number(cap), 0};
  for (size_t unit = tile; unit < units; unit += tiles)
    att_step(q, keys, values, positions, y, stats, &n, splits, unit);
}

// parts [heads, splits, W] and stats [heads, splits, 2] of attention_part -> y [heads, W].
EXPORT scanwright_attention_join(const float *parts, const float *stats, float *y, size_t heads,
                                 size_t splits, size_t W, size_t per, size_t tile) {
  const size_t to = (tile + 1) * per < heads ? (tile + 1) * per : heads;
  for (size_t h = tile * per; h < to; h++) {
    const float *of = stats + h * splits * 2;
    float most = of[0], total = 0.0f;
    for (size_t s = 1; s < splits; s++) most = of[2 * s] > most ? of[2 * s] : most;
    for (size_t i = 0; i < W; i++) y[h * W + i] = 0.0f;
    for (size_t s = 0; s < splits; s++) {
      const float by = vexp(splat(of[2 * s] - most))[0];
      const float *part = parts + (h * splits + s) * W;
      total += by * of[2 * s + 1];
      for (size_t i = 0; i < W; i++) y[h * W + i] += by * part[i];
    }
    const float by = total == 0.0f ? 0.0f : 1.0f / total;
    for (size_t i = 0; i < W; i++) y[h * W + i] *= by;
  }
}

// T tokens a row, written already: q [B, T, H, D], keys and values [B, G, C, D] -> y [B, T, H, W].
// Tile `tile` takes every `tiles`th block of queries: later ones see more.
EXPORT scanwright_attention_scan(const float *q, const float *keys, const float *values,
                                 const int32_t *lengths, const int32_t *positions, float *y,
                                 size_t B, size_t T, size_t H, size_t G, size_t C, size_t D,
                                 size_t W, size_t scale, size_t cap, size_t tiles, size_t tile) {
  const att_sizes n = {T, H, G, C, D, W, number(scale), number(cap), 0};
  const size_t width = (D + BLOCK_O - 1) / BLOCK_O * BLOCK_O;
  const size_t rows = ATT_ROOM / width < ATT_ROWS ? ATT_ROOM / width : ATT_ROWS;
  const size_t blocks = (T * (H / G) + rows - 1) / rows;
  for (size_t unit = tile; unit < B * G * blocks; unit += tiles) {
    att_block of;
    const size_t first = unit / (B * G) * rows, b = unit % (B * G) / G, g = unit % G;
    const size_t region = (b * G + g) * C * D;
    if (att_open(&of, &n, q, b, g, first, rows, BLOCK_O, lengths[b], positions[b]))
      att_many(&of, keys + region, values + region, D, 0, att_end(&of));
    att_close(&of, &n, y, b, g, first, W, 1);
  }
}

// T tokens a row that are not written yet, in a ring: k and v [B, T, G, D] are theirs, keys and values
// [B, G, C, D] hold position p, of the last C before them, at place p mod C.
EXPORT scanwright_attention_ring(const float *q, const float *k, const float *v, const float *keys,
                                 const float *values, const int32_t *lengths,
                                 const int32_t *positions, float *y, size_t B, size_t T, size_t H,
                                 size_t G, size_t C, size_t D, size_t window, size_t scale,
                                 size_t cap, size_t tiles, size_t tile) {
  const att_sizes n = {T, H, G, C, D, D, number(scale), number(cap), window};
  const size_t width = (D + BLOCK_O - 1) / BLOCK_O * BLOCK_O;
  const size_t rows = ATT_ROOM / width < ATT_ROWS ? ATT_ROOM / width : ATT_ROWS;
  const size_t blocks = (T * (H / G) + rows - 1) / rows;
  for (size_t unit = tile; unit < B * G * blocks; unit += tiles) {
    att_block of;
    const size_t first = unit / (B * G) * rows, b = unit % (B * G) / G, g = unit % G;
    const size_t region = (b * G + g) * C * D, own = (b * T * G + g) * D;
    if (att_open(&of, &n, q, b, g, first, rows, BLOCK_O, lengths[b], positions[b])) {
      const size_t begin = positions[b] > 0 ? (size_t)positions[b] : 0, end = att_end(&of);
      size_t at = begin > C ? begin - C : 0;
      if (of.low[0] > at) at = of.low[0];
      while (at < begin) {
        const size_t place = at % C, left = C - place < begin - at ? C - place : begin - at;
        att_many(&of, keys + region + place * D, values + region + place * D, D, at, left);
        at += left;
      }
      at -= begin;  // of the tokens' own, the first that the first query sees
      att_many(&of, k + own + at * G * D, v + own + at * G * D, G * D, begin + at,
               end - begin - at);
    }
    att_close(&of, &n, y, b, g, first, D, 1);
  }
}
