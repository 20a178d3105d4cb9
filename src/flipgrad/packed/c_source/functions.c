//: layer
/* A layer's geometry: images [height][width][channels] become [..][out_width][outputs]. */
typedef struct {
    int height, width, channels, out_width, outputs;
    int rows, columns, stride_y, stride_x, top, left, dilation_y, dilation_x, groups;
    /* What is around the image (0: nothing, or a number), and where from: 0 there, 1 reflected, 2 the border, 3 the other side. */
    int padding, mode;
} layer;

//: place
/* The row or column that stands for number i of size, or -1 if that is padding. */
static int place(int i, int size, int mode)
{
    if (i >= 0 && i < size)
        return i;
    if (mode == 1)
        return i < 0 ? -i : 2 * (size - 1) - i;
    if (mode == 2)
        return i < 0 ? 0 : size - 1;
    return mode == 3 ? (i + size) % size : -1;
}

//: count_ones
/* The number of ones in a word. */
static int count_ones(uint32_t word)
{
#if defined(__GNUC__)
    return __builtin_popcount(word);
#else
    word = word - ((word >> 1) & 0x55555555u);
    word = (word & 0x33333333u) + ((word >> 2) & 0x33333333u);
    word = (word + (word >> 4)) & 0x0f0f0f0fu;
    return (int)(((word * 0x01010101u) & 0xffffffffu) >> 24);
#endif
}

//: image_value
/* A pixel as the network sees it. */
static real image_value(const uint8_t *in, int channels, int at, int channel)
{
    return (float)(in[at * channels + channel] * PIXEL_SCALE + PIXEL_SHIFT);
}

//: image_number
/* A pixel as the network sees it, in fixed point. */
static int32_t image_number(const uint8_t *in, int channels, int at, int channel)
{
    return pixels[in[at * channels + channel]];
}

//: input_value
static real input_value(const float *in, int channels, int at, int channel)
{
    return in[at * channels + channel];
}

//: real_value
static real real_value(const real *in, int channels, int at, int channel)
{
    return in[at * channels + channel];
}

//: fixed_value
static real fixed_value(const fixed *in, int channels, int at, int channel)
{
    return (real)in[at * channels + channel];
}

//: fixed_number
static int32_t fixed_number(const fixed *in, int channels, int at, int channel)
{
    return in[at * channels + channel];
}

//: bits_value
/* A state: 1 or -1. */
static real bits_value(const uint32_t *in, int channels, int at, int channel)
{
    return in[at * ((channels + 31) / 32) + channel / 32] >> channel % 32 & 1u ? 1 : -1;
}

//: bits_number
/* A state: 1 or -1. */
static int32_t bits_number(const uint32_t *in, int channels, int at, int channel)
{
    return in[at * ((channels + 31) / 32) + channel / 32] >> channel % 32 & 1u ? 1 : -1;
}

//: load <- VALUE
/* One pixel, as it is. */
static void load(NUMBER *row, const ELEMENT *in, int channels, int pixel)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = VALUE(in, channels, pixel, c);
}

//: convolve <- layer place VALUE
/* One pixel of a convolution by weights [outputs][rows][columns][channels / groups]. */
static void convolve(NUMBER *row, const ELEMENT *in, const layer *of, const WEIGHT *weight, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    const int inputs = of->channels / of->groups, outputs = of->outputs / of->groups;
    int o, i, j, c;
    for (o = 0; o < of->outputs; o++) {
        const int first = o / outputs * inputs;
        NUMBER sum = 0;
        for (i = 0; i < of->rows; i++) {
            const int from_y = place(y + i * of->dilation_y, of->height, of->mode);
            for (j = 0; j < of->columns; j++, weight += inputs) {
                const int from_x = place(x + j * of->dilation_x, of->width, of->mode);
                if (from_y >= 0 && from_x >= 0) {
                    for (c = 0; c < inputs; c++)
                        sum += weight[c] * VALUE(in, of->channels, from_y * of->width + from_x, first + c);
                } else {
                    for (c = 0; of->padding != 0 && c < inputs; c++)
                        sum += weight[c] * (NUMBER)of->padding;
                }
            }
        }
        row[o] = sum;
    }
}

//: sum_bits <- layer place count_ones
/* One pixel of a convolution of states by weights, both 1 or -1 and a bit each: equal bits minus different ones. */
static void sum_bits(int32_t *row, const uint32_t *in, const layer *of, const uint32_t *weight, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    const int inputs = of->channels / of->groups, outputs = of->outputs / of->groups, words = (of->channels + 31) / 32;
    int o, i, j, w;
    for (o = 0; o < of->outputs; o++) {
        /* The channels of its group, and the words that hold these. */
        const int first = o / outputs * inputs, last = first + inputs - 1, low = first / 32, high = last / 32;
        const uint32_t low_mask = 0xffffffffu << first % 32, high_mask = 0xffffffffu >> (31 - last % 32);
        int32_t counted = 0, different = 0;
        for (i = 0; i < of->rows; i++) {
            const int from_y = place(y + i * of->dilation_y, of->height, 0);
            for (j = 0; j < of->columns; j++, weight += high - low + 1) {
                const int from_x = place(x + j * of->dilation_x, of->width, 0), inside = from_y >= 0 && from_x >= 0;
                const uint32_t *from = inside ? in + (from_y * of->width + from_x) * words : in;
                if (!inside && of->padding == 0)
                    continue;
                counted += inputs;
                for (w = low; w <= high; w++) {
                    const uint32_t state = inside ? from[w] : of->padding > 0 ? 0xffffffffu : 0;
                    const uint32_t mask = (w == low ? low_mask : 0xffffffffu) & (w == high ? high_mask : 0xffffffffu);
                    different += count_ones((state ^ weight[w - low]) & mask);
                }
            }
        }
        row[o] = counted - 2 * different;
    }
}

//: sum_numbers <- layer place
/* One pixel of a convolution of whole numbers by weights 1 or -1, a bit each. */
static void sum_numbers(int32_t *row, const fixed *in, const layer *of, const uint32_t *weight, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    const int inputs = of->channels / of->groups, outputs = of->outputs / of->groups;
    int o, i, j, c;
    for (o = 0; o < of->outputs; o++) {
        const int first = o / outputs * inputs, low = first / 32;
        int32_t sum = 0;
        for (i = 0; i < of->rows; i++) {
            const int from_y = place(y + i * of->dilation_y, of->height, 0);
            for (j = 0; j < of->columns; j++, weight += (first + inputs - 1) / 32 - low + 1) {
                const int from_x = place(x + j * of->dilation_x, of->width, 0), inside = from_y >= 0 && from_x >= 0;
                const fixed *from = inside ? in + (from_y * of->width + from_x) * of->channels : in;
                for (c = first; c < first + inputs; c++) {
                    const int32_t number = inside ? from[c] : of->padding;
                    sum += weight[c / 32 - low] >> c % 32 & 1u ? number : -number;
                }
            }
        }
        row[o] = sum;
    }
}

//: window_max <- layer VALUE
/* One pixel of largest numbers in windows. */
static void window_max(NUMBER *row, const ELEMENT *in, const layer *of, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    const int first_y = y < 0 ? 0 : y, first_x = x < 0 ? 0 : x;
    int i, j, c;
    for (c = 0; c < of->channels; c++)
        row[c] = VALUE(in, of->channels, first_y * of->width + first_x, c);
    for (i = first_y; i < y + of->rows && i < of->height; i++)
        for (j = first_x; j < x + of->columns && j < of->width; j++)
            for (c = 0; c < of->channels; c++) {
                const NUMBER value = VALUE(in, of->channels, i * of->width + j, c);
                row[c] = value > row[c] ? value : row[c];
            }
}

//: any_of_bits <- layer
/* One pixel of max-pooling of states: a unit is 1 if any in its window is. */
static void any_of_bits(uint32_t *out, const uint32_t *in, const layer *of, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    const int words = (of->channels + 31) / 32;
    int i, j, w;
    for (w = 0; w < words; w++)
        out[w] = 0;
    for (i = y < 0 ? -y : 0; i < of->rows && y + i < of->height; i++)
        for (j = x < 0 ? -x : 0; j < of->columns && x + j < of->width; j++)
            for (w = 0; w < words; w++)
                out[w] |= in[((y + i) * of->width + x + j) * words + w];
}

//: fill
/* The same everywhere. */
static void fill(ELEMENT *out, int count, ELEMENT value)
{
    int i;
    for (i = 0; i < count; i++)
        out[i] = value;
}

//: rearrange
/* Numbers in another order: count[0] x ... x count[4] of them, which lie from[] apart in one array and to[] in the other. */
static void rearrange(ELEMENT *out, const ELEMENT *in, const int32_t *count, const int32_t *to, const int32_t *from)
{
    int a, b, c, d, e;
    for (a = 0; a < count[0]; a++)
        for (b = 0; b < count[1]; b++)
            for (c = 0; c < count[2]; c++)
                for (d = 0; d < count[3]; d++)
                    for (e = 0; e < count[4]; e++)
                        out[a * to[0] + b * to[1] + c * to[2] + d * to[3] + e * to[4]] =
                            in[a * from[0] + b * from[1] + c * from[2] + d * from[3] + e * from[4]];
}

//: rearrange_bits
/* Bits in another order: count[0] x ... x count[4] of them, which lie from[] apart in one array and to[] in the other. */
static void rearrange_bits(uint32_t *out, int start, const uint32_t *in, const int32_t *count, const int32_t *to,
                           const int32_t *from)
{
    int a, b, c, d, e;
    for (a = 0; a < count[0]; a++)
        for (b = 0; b < count[1]; b++)
            for (c = 0; c < count[2]; c++)
                for (d = 0; d < count[3]; d++)
                    for (e = 0; e < count[4]; e++) {
                        const int i = start + a * to[0] + b * to[1] + c * to[2] + d * to[3] + e * to[4];
                        const int j = a * from[0] + b * from[1] + c * from[2] + d * from[3] + e * from[4];
                        if (in[j / 32] >> j % 32 & 1u)
                            out[i / 32] |= (uint32_t)1 << i % 32;
                        else
                            out[i / 32] &= ~((uint32_t)1 << i % 32);
                    }
}

//: multiply
/* Every channel times a number of its own. */
static void multiply(real *row, int channels, const real *scale)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] *= scale[c];
}

//: shift
/* Every channel plus a number of its own. */
static void shift(real *row, int channels, const real *by)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] += by[c];
}

//: scale_all
/* Every channel times one number. */
static void scale_all(real *row, int channels, real factor)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] *= factor;
}

//: prelu
/* Negative numbers times a weight of their channel. */
static void prelu(real *row, int channels, const real *weight)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] >= 0 ? row[c] : row[c] * weight[c];
}

//: clip
static void clip(NUMBER *row, int channels, NUMBER low, NUMBER high)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] < low ? low : row[c] > high ? high : row[c];
}

//: relu
static void relu(real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] > 0 ? row[c] : 0;
}

//: leaky_relu
static void leaky_relu(real *row, int channels, real slope)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] >= 0 ? row[c] : row[c] * slope;
}

//: sigmoid_of
static real sigmoid_of(real a)
{
    const real tail = EXP(a < 0 ? a : -a);
    return (a < 0 ? tail : 1) / (1 + tail);
}

//: sigmoid <- sigmoid_of
static void sigmoid(real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = sigmoid_of(row[c]);
}

//: silu <- sigmoid_of
static void silu(real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] *= sigmoid_of(row[c]);
}

//: hyperbolic_tangent
static void hyperbolic_tangent(real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = TANH(row[c]);
}

//: elu
static void elu(real *row, int channels, real alpha)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] >= 0 ? row[c] : alpha * EXPM1(row[c]);
}

//: softplus
static void softplus(real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = (row[c] > 0 ? row[c] : 0) + LOG1P(EXP(row[c] > 0 ? -row[c] : row[c]));
}

//: add <- VALUE
/* Plus another image's pixel, whose numbers are multiples of a unit. */
static void add(real *row, const ELEMENT *in, int channels, int pixel, real unit)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] += VALUE(in, channels, pixel, c) * unit;
}

//: repeat
/* The channels, several times. */
static void repeat(NUMBER *row, int channels, int count)
{
    int c;
    for (c = channels; c < channels * count; c++)
        row[c] = row[c - channels];
}

//: to_real
/* Whole numbers as real ones, each channel by its scale and shift. */
static void to_real(real *row, const int32_t *numbers, int channels, const real *scale, const real *by)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = (real)numbers[c] * scale[c] + by[c];
}

//: limited
/* A number that can be stored, or the nearest that can. */
static int32_t limited(int64_t number, int32_t limit)
{
    return number > limit ? limit : number < -limit ? -limit : (int32_t)number;
}

//: halved
/* A number divided by 2^times, rounded. */
static int64_t halved(int64_t number, int times)
{
    const int64_t half = times > 0 ? (int64_t)1 << (times - 1) : 0;
    return number < 0 ? -((half - number) >> times) : (number + half) >> times;
}

//: to_fixed
/* Real numbers in fixed point: as multiples of 1 / scale. */
static void to_fixed(int32_t *numbers, const real *row, int channels, real scale)
{
    int c;
    for (c = 0; c < channels; c++) {
        const real number = row[c] * scale;
        numbers[c] = number > (real)LARGEST ? LARGEST : number < -(real)LARGEST ? -LARGEST : (int32_t)(number + (number < 0 ? -(real)0.5 : (real)0.5));
    }
}

//: rescale <- limited halved
/* (number * multiplier + offset) / 2^times of every channel: a scale and a shift in fixed point. */
static void rescale(int32_t *row, int channels, const int32_t *multiplier, const int32_t *offset, int times)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = limited(halved((int64_t)row[c] * multiplier[c] + offset[c], times), LARGEST);
}

//: prelu_fixed <- limited halved
/* Negative numbers times a weight of their channel, which is a multiple of 2^-16. */
static void prelu_fixed(int32_t *row, int channels, const int32_t *weight)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = row[c] >= 0 ? row[c] : limited(halved((int64_t)row[c] * weight[c], 16), LARGEST);
}

//: plus_real
static real plus_real(real a, real b)
{
    return a + b;
}

//: plus_limited <- limited
/* In fixed point sums may be too large: they become the largest. */
static int32_t plus_limited(int32_t a, int32_t b)
{
    return limited((int64_t)a + b, LARGEST);
}

//: window_sum <- layer VALUE PLUS
/* One pixel of sums over windows. */
static void window_sum(NUMBER *row, const ELEMENT *in, const layer *of, int pixel)
{
    const int y = pixel / of->out_width * of->stride_y - of->top, x = pixel % of->out_width * of->stride_x - of->left;
    int i, j, c;
    for (c = 0; c < of->channels; c++)
        row[c] = 0;
    for (i = y < 0 ? -y : 0; i < of->rows && y + i < of->height; i++)
        for (j = x < 0 ? -x : 0; j < of->columns && x + j < of->width; j++)
            for (c = 0; c < of->channels; c++)
                row[c] = PLUS(row[c], VALUE(in, of->channels, (y + i) * of->width + x + j, c));
}

//: join <- VALUE limited halved
/* Plus another image's pixel, times multiplier / 2^times. */
static void join(int32_t *row, const ELEMENT *in, int channels, int pixel, int32_t multiplier, int times)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = limited(row[c] + halved((int64_t)VALUE(in, channels, pixel, c) * multiplier, times), LARGEST);
}

//: store
/* Keeps one pixel; numbers that are too large become the largest. */
static void store(ELEMENT *out, const NUMBER *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++)
        out[c] = STORED(row[c]);
}

//: sign_real
/* States of one pixel: 1 where a number is not negative. */
static void sign_real(uint32_t *out, const real *row, int channels)
{
    int c;
    for (c = 0; c < channels; c++) {
        if (c % 32 == 0)
            out[c / 32] = 0;
        out[c / 32] |= (uint32_t)(row[c] >= 0) << c % 32;
    }
}

//: threshold
/* States of one pixel: 1 where a sum reaches the threshold of its channel. */
static void threshold(uint32_t *out, const int32_t *row, int channels, const int32_t *least)
{
    int c;
    for (c = 0; c < channels; c++) {
        if (c % 32 == 0)
            out[c / 32] = 0;
        out[c / 32] |= (uint32_t)(row[c] >= least[c]) << c % 32;
    }
}

//: turn
/* Channels whose bit is set change their sign. */
static void turn(int32_t *row, int channels, const uint32_t *which)
{
    int c;
    for (c = 0; c < channels; c++)
        row[c] = which[c / 32] >> c % 32 & 1u ? -row[c] : row[c];
}

//: randomness
/* One draw of all units: its seed and number, the layer that is drawn now, and 64 random words of this. */
typedef struct {
    uint32_t seed[2], sample, layer, block;
    int filled;
    uint32_t words[64];
} randomness;

/* The random word of a unit: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011). */
static uint32_t random_word(randomness *draw, uint32_t unit)
{
    uint32_t lane, round;
    if (!draw->filled || draw->block != unit / 64) {
        for (lane = 0; lane < 16; lane++) {
            uint32_t a = 16 * (unit / 64) + lane, b = 0, c = draw->sample, d = draw->layer;
            for (round = 0; round < 10; round++) {
                const uint64_t first = (uint64_t)a * 0xd2511f53u, second = (uint64_t)c * 0xcd9e8d57u;
                a = (uint32_t)(second >> 32) ^ b ^ (draw->seed[0] + round * 0x9e3779b9u);
                b = (uint32_t)second;
                c = (uint32_t)(first >> 32) ^ d ^ (draw->seed[1] + round * 0xbb67ae85u);
                d = (uint32_t)first;
            }
            draw->words[lane] = a;
            draw->words[lane + 16] = b;
            draw->words[lane + 32] = c;
            draw->words[lane + 48] = d;
        }
        draw->block = unit / 64;
        draw->filled = 1;
    }
    return draw->words[unit % 64];
}

/* The next layer's units are drawn. */
static void next_layer(randomness *draw, uint32_t number)
{
    draw->layer = number;
    draw->filled = 0;
}

//: draw_table <- randomness
/* States of one pixel: 1 if a random word is below chance[start[c] + k], k counting the sums from first[c] in steps. */
static void draw_table(uint32_t *out, const int32_t *row, int channels, const int32_t *first, const int32_t *start,
                       const uint32_t *chance, int step, randomness *draw, int pixel)
{
    int c;
    for (c = 0; c < channels; c++) {
        const int32_t number = row[c] < first[c] ? -1 : (row[c] - first[c]) / step;
        const uint32_t below = number < 0 ? 0 : number >= start[c + 1] - start[c] ? 0xffffffffu : chance[start[c] + number];
        if (c % 32 == 0)
            out[c / 32] = 0;
        out[c / 32] |= (uint32_t)(random_word(draw, (uint32_t)pixel * (uint32_t)channels + (uint32_t)c) < below) << c % 32;
    }
}

//: draw_fixed <- randomness
/* States of one pixel, of numbers in units of 2^-16 of the noise's scale. The probabilities tail[k] of -k / 32 are interpolated. */
static void draw_fixed(uint32_t *out, const int32_t *row, int channels, const uint32_t *tail, int entries, randomness *draw,
                       int pixel)
{
    int c;
    for (c = 0; c < channels; c++) {
        const int32_t size = row[c] < 0 ? -row[c] : row[c], k = size >> 11;
        uint32_t below = 0;
        if (k < entries - 1)
            below = tail[k] - (uint32_t)((uint64_t)(tail[k] - tail[k + 1]) * (uint32_t)(size & 2047) >> 11);
        if (row[c] >= 0)
            below = 0xffffffffu - below;
        if (c % 32 == 0)
            out[c / 32] = 0;
        out[c / 32] |= (uint32_t)(random_word(draw, (uint32_t)pixel * (uint32_t)channels + (uint32_t)c) < below) << c % 32;
    }
}

//: logistic
static real logistic(real tail)
{
    return EXP(tail) / (1 + EXP(tail));
}

//: normal
static real normal(real tail)
{
    return ERFC(-tail * (real)0.70710678118654752) / 2;
}

//: laplace
static real laplace(real tail)
{
    return EXP(tail) / 2;
}

//: uniform
static real uniform(real tail)
{
    return tail < -1 ? 0 : (tail + 1) / 2;
}

//: draw_real <- randomness NOISE
/* States of one pixel: each is 1 with the probability that noise of that scale is not larger than its number. */
static void draw_real(uint32_t *out, const real *row, int channels, real scale, randomness *draw, int pixel)
{
    int c;
    for (c = 0; c < channels; c++) {
        const real a = row[c] / scale, lower = NOISE(a < 0 ? a : -a);
        const real words = (a < 0 ? lower : 1 - lower) * (real)4294967296.0 + (real)0.5;
        const uint32_t below = words >= (real)4294967295.0 ? 0xffffffffu : (uint32_t)words;
        if (c % 32 == 0)
            out[c / 32] = 0;
        out[c / 32] |= (uint32_t)(random_word(draw, (uint32_t)pixel * (uint32_t)channels + (uint32_t)c) < below) << c % 32;
    }
}
