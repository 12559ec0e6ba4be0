// Mamba's recurrence, arXiv:2312.00752: for each channel, with dt = softplus(raw + bias),
//
//   h = exp(-dt exp(A_log)) h + dt x B,   y = h C + D x   (times silu(z) where gated)
//
// Any number of tokens. x, raw, B, C and z are columns of wider rows. The state is [B, I, N]; the
// old one is read, the new one written. Lanes are channels: states and rates are transposed once,
// and then no sum crosses lanes. Rates
// are taken times log2(e), decays as powers of two.
#include "gates.h"

enum { SCAN_MAPS = 16, SCAN_TOKENS = 64 };

typedef struct {
  const float *x, *raw, *maps_in, *maps_out, *z;
  size_t x_width, raw_width, maps_width, out_width, z_width;
} scan_rows;

// to[n][i] = from[i][n]: `maps` <= SCAN_MAPS columns of `count` <= LANES rows, else zeros.
INLINE void scan_turned(const float *from, vf *to, size_t stride, size_t maps, size_t count) {
  for (size_t n = 0; n < SCAN_MAPS; n += LANES) {
    vf rows[LANES];
    for (size_t i = 0; i < LANES; i++)
      rows[i] = i < count && n < maps ? load_upto(from + i * stride + n, maps - n) : zero();
    transpose(rows);
    for (size_t i = 0; i < LANES; i++) to[n + i] = rows[i];
  }
}

INLINE void scan_turned_back(const vf *from, float *to, size_t stride, size_t maps, size_t count) {
  for (size_t n = 0; n < SCAN_MAPS && n < maps; n += LANES) {
    vf rows[LANES];
    for (size_t i = 0; i < LANES; i++) rows[i] = from[n + i];
    transpose(rows);
    for (size_t i = 0; i < count; i++) store_upto(to + i * stride + n, rows[i], maps - n);
  }
}

// Up to SCAN_TOKENS tokens, of which `length` are valid, through `maps` <= SCAN_MAPS numbers of the
// state of each of `count` channels. `first` and `last`: whether these are the first, and the last,
// numbers of the state. What only tokens need is done for all of them before and after, so that no
// token waits for it.
INLINE void scan_tokens(const scan_rows *in, size_t t, vf *h, const vf *rates, vf bias, vf skip,
                        float *y, size_t I, size_t steps, size_t length, size_t count, int first,
                        int last, int gated, const size_t maps) {
  vf widths[SCAN_TOKENS], inputs[SCAN_TOKENS], sums[SCAN_TOKENS];
  for (size_t i = 0; i < steps; i++) {
    const vf raw = load_upto(in->raw + (t + i) * in->raw_width, count) + bias;
    widths[i] = t + i < length ? softplus(raw) : zero();
    inputs[i] = widths[i] * load_upto(in->x + (t + i) * in->x_width, count);
  }
  for (size_t i = 0; i < steps; i++) {
    const float *b = in->maps_in + (t + i) * in->maps_width;
    const float *c = in->maps_out + (t + i) * in->out_width;
    vf even = zero(), odd = zero();
    for (size_t n = 0; n < maps; n++) {
      h[n] = h[n] * power_of_two(widths[i] * rates[n]) + inputs[i] * splat(b[n]);
      if (n % 2)
        odd += h[n] * splat(c[n]);
      else
        even += h[n] * splat(c[n]);
    }
    sums[i] = even + odd;
  }
  for (size_t i = 0; i < steps; i++) {
    float *out = y + (t + i) * I;
    vf v = first ? sums[i] : sums[i] + load_upto(out, count);
    if (last) {
      v += skip * load_upto(in->x + (t + i) * in->x_width, count);
      if (gated) v *= silu(load_upto(in->z + (t + i) * in->z_width, count));
    }
    store_upto(out, v, count);
  }
}

// Tile number `tile`: `per` channels, a multiple of LANES, of one row of the batch. Outputs beyond a
// row's length are zero.
EXPORT scanwright_selective_scan(const float *x, const float *raw, const float *maps_in,
                                 const float *maps_out, const float *z, const float *bias,
                                 const float *A_log, const float *D, const int32_t *lengths,
                                 const float *state, float *y, float *new_state, size_t T, size_t I,
                                 size_t N, size_t x_width, size_t x_start, size_t raw_width,
                                 size_t raw_start, size_t in_width, size_t in_start,
                                 size_t out_width, size_t out_start, size_t z_width, size_t z_start,
                                 size_t gated, size_t per, size_t tile) {
  const size_t tiles = (I + per - 1) / per, b = tile / tiles, from = tile % tiles * per;
  const size_t to = from + per < I ? from + per : I, row = b * T;
  const size_t length = lengths[b] < 0 ? 0 : (size_t)lengths[b] > T ? T : (size_t)lengths[b];
  const size_t steps = T == 1 ? 1 : length;  // a step gives outputs of inactive rows too
  y += row * I;
  for (size_t c = from; c < to; c += LANES) {
    const size_t count = to - c < LANES ? to - c : LANES;
    const vf of_bias = load_upto(bias + c, count), skip = load_upto(D + c, count);
    for (size_t n = 0; n < N; n += SCAN_MAPS) {
      const scan_rows in = {x + row * x_width + x_start + c,
                            raw + row * raw_width + raw_start + c,
                            maps_in + row * in_width + in_start + n,
                            maps_out + row * out_width + out_start + n,
                            z + row * z_width + z_start + c,
                            x_width,
                            raw_width,
                            in_width,
                            out_width,
                            z_width};
      const size_t maps = N - n < SCAN_MAPS ? N - n : SCAN_MAPS, at = (b * I + c) * N + n;
      const int last = n + SCAN_MAPS >= N;
      vf h[SCAN_MAPS], rates[SCAN_MAPS];
      scan_turned(state + at, h, N, maps, count);
      scan_turned(A_log + c * N + n, rates, N, maps, count);
      for (size_t i = 0; i < maps; i++) rates[i] = vexp(rates[i]) * splat(-1.44269504f);
      for (size_t t = 0; t < steps; t += SCAN_TOKENS) {
        const size_t now = steps - t < SCAN_TOKENS ? steps - t : SCAN_TOKENS;
        if (count == LANES && maps == SCAN_MAPS)
          scan_tokens(&in, t, h, rates, of_bias, skip, y + c, I, now, length, LANES, n == 0, last,
                      (int)gated, SCAN_MAPS);
        else
          scan_tokens(&in, t, h, rates, of_bias, skip, y + c, I, now, length, count, n == 0, last,
                      (int)gated, maps);
      }
      if (!length) scan_turned(state + at, h, N, maps, count);  // whatever the token holds
      scan_turned_back(h, new_state + at, N, maps, count);
    }
    for (size_t t = steps; t < T; t++) store_upto(y + t * I + c, zero(), count);
  }
}
