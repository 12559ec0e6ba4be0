// RG-LRU with its gates' sigmoids before it and its branch's product behind (emit/ops/rglru.py,
// `mixer`). A tile is a range of channels, each of which goes through all valid tokens by itself.
#include "gates.h"

// exp(x) - 1 for x <= 0: above -1/2 by its series to x^8.
INLINE vf lru_expm1(vf x) {
  const vf near = choose(x > splat(-0.5f), x, splat(-0.5f));
  vf series = splat(1.0f);
  series = series * near * splat(1.0f / 8) + splat(1.0f);
  series = series * near * splat(1.0f / 7) + splat(1.0f);
  series = series * near * splat(1.0f / 6) + splat(1.0f);
  series = series * near * splat(1.0f / 5) + splat(1.0f);
  series = series * near * splat(1.0f / 4) + splat(1.0f);
  series = series * near * splat(1.0f / 3) + splat(1.0f);
  series = series * near * splat(1.0f / 2) + splat(1.0f);
  return choose(x > splat(-0.5f), near * series, vexp(x) - splat(1.0f));
}

// x, branch [B, T, W], r and i the gates without bias and sigmoid, as their biases [W]; rate [W];
// lengths, positions i32[B]; state [B, W] -> y [B, T, W] and new like state, which stays as it is
// beyond a row's length; `per` channels a tile.
EXPORT scanwright_rglru(const float *x, const float *branch, const float *r, const float *r_bias,
                        const float *i, const float *i_bias, const float *rate,
                        const int32_t *lengths, const int32_t *positions, const float *state,
                        float *y, float *new, size_t B, size_t T, size_t W, size_t per,
                        size_t tile) {
  const size_t to = (tile + 1) * per < W ? (tile + 1) * per : W;
  for (size_t b = 0; b < B; b++) {
    const size_t given = lengths[b] > 0 ? (size_t)lengths[b] : 0, tokens = given < T ? given : T;
    const int fresh = tokens > 0 && positions[b] == 0;
    for (size_t c = tile * per; c < to; c += LANES) {
      const size_t left = to - c;
      const vf of_r = load_upto(r_bias + c, left), of_i = load_upto(i_bias + c, left);
      const vf by = load_upto(rate + c, left) * splat(-8.0f);
      vf h = fresh ? zero() : load_upto(state + b * W + c, left);
      for (size_t t = 0; t < tokens; t++) {
        const size_t at = (b * T + t) * W + c;
        const vf open = vsigmoid(load_upto(r + at, left) + of_r);
        const vf in = vsigmoid(load_upto(i + at, left) + of_i) * load_upto(x + at, left);
        const vf d = lru_expm1(open * by);
        const vf kept = -d * (splat(2.0f) + d);  // 1 - a²
        const vf scale = (int64_t)positions[b] + (int64_t)t == 0 ? splat(1.0f)
                                                                 : __builtin_elementwise_sqrt(kept);
        h = h + (d * h + scale * in);
        store_upto(y + at, h * load_upto(branch + at, left), left);
      }
      store_upto(new + b * W + c, h, left);
      for (size_t t = tokens; t < T; t++) {
        const size_t at = (b * T + t) * W + c;
        store_upto(y + at, h * load_upto(branch + at, left), left);
      }
    }
  }
}
