// The interface to Python: plain structs and C functions, mirrored in pagemill_kernels/cpu/library.py. Raise
// kAbiVersion with every change here.
#pragma once
#include <cstdint>

namespace pagemill {

constexpr int32_t kAbiVersion = 34;

// The first four formats, kFloats8 (e4m3) and kFloats4 (values of a table) are multiplied in float32. kDots4 and kDots8
// round activations to 16-bit integers (dots.cpp), kPairs rounds them to bfloat16 (bfloat16.cpp). From
// PackedWeight::bfloat16_rows on, the last five are multiplied in bfloat16, and from float32_rows on kPairs in float32.
enum Format : int32_t {
  kFloat32 = 0, kBfloat16 = 1, kCodes8 = 2, kCodes4 = 3, kDots4 = 4, kDots8 = 5, kPairs = 6, kFloats8 = 7, kFloats4 = 8
};

struct PackedWeight {
  int32_t format;
  int32_t group;        // inputs that share a scale: 16 (8 bits only) or a multiple of 32; quantized only
  int32_t has_offsets;  // value = code * scale + offset, else code * scale; quantized only
  int32_t bfloat16_rows;  // rows from which on bfloat16 is used; 0: never
  int32_t float32_rows;   // rows from which on kPairs is multiplied in float32; 0: never
  int64_t out_features;
  int64_t in_features;
  const uint8_t* codes;
  const float* scales;
  const int32_t* input_order;  // [in_features]: the input that each column multiplies; null: in order
  const float* table;          // [16]: the values of kFloats4
};

// Activations of an MLP; activation.cpp.
enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kGeluQuick = 3, kRelu = 4, kRelu2 = 5 };

// Types of keys and values in the cache; kv_store.h.
enum CacheType : int32_t { kCacheFloat32 = 0, kCacheBfloat16 = 1, kCacheInt8 = 2 };

// Records of sampling parameters, defined in sampling.cpp: what pagemill_sampling_columns() describes, in this order.
struct DrawSettings;
struct PenaltySettings;

// A step's rows and their settings; sampling.cpp. Null arrays: no row uses the feature. [rows] arrays named `_of`
// contain a row's index in the arrays that follow, or -1.
struct SamplingArgs {
  const float* logits;  // [num_rows][vocab_size]
  int64_t num_rows;
  int64_t vocab_size;
  const DrawSettings* draws;  // [num_rows], like the next two
  const uint64_t* keys;
  const int64_t* mask_of;
  const uint32_t* masks;  // [masks][mask_words]
  int64_t mask_words;
  const int64_t* edit_starts;  // [num_rows + 1]
  const int64_t* edit_tokens;
  const float* edit_biases;
  const int64_t* penalty_of;
  const PenaltySettings* penalties;  // [penalties], like the next one
  const int64_t* count_rows;  // indices in the two tables below
  const uint8_t* in_prompt;   // [places][vocab_size]
  int32_t* in_output;         // [places][vocab_size]; sampling adds the sampled tokens
  const int64_t* report_of;
  int64_t top_width;
  int64_t* token_ids;  // [num_rows]
  uint8_t* finite;     // [num_rows]
  float* chosen;       // [reports]: the chosen token's logit; the next three have this shape too
  float* best;         // the largest logit
  float* log_totals;   // log of the sum of exp(logit - best)
  int64_t* ranks;
  float* top;        // [reports][top_width]
  int64_t* top_ids;  // [reports][top_width]
  int32_t num_threads;
};

// A rank's part of the vocabulary of rows that draw; sampling.cpp.
struct PartArgs {
  const float* logits;  // [num_rows][num_tokens]
  int64_t num_rows;
  int64_t num_tokens;
  int64_t first;              // id of the first token
  int64_t vocab_size;         // of all parts
  const DrawSettings* draws;  // [num_rows], like all that follow except the last
  const uint64_t* keys;
  const float* best;   // the largest logit of all parts
  float* sums;         // of rows without top_k and top_p: the largest x + noise; -inf: no token can be drawn
  int64_t* token_ids;  // its token
  int64_t* masses;     // of rows with them: the mass of the part, where top_k does not decide
  int64_t* counts;     // its candidates
  int64_t width;
  uint64_t* candidates;  // [num_rows][width], the likeliest first
  int32_t num_threads;
};

struct AttentionArgs {
  const float* query;  // [tokens][num_heads][head_dim], tokens query_stride floats apart
  const void* cache;               // of one layer, blocks block_stride bytes apart
  const int32_t* block_tables;     // [requests][block_table_stride]
  const int64_t* query_start_loc;  // [requests + 1]
  const int64_t* seq_lens;         // [requests]
  float* out;                      // [tokens][num_heads][head_dim]
  const float* sinks;              // [num_heads]: a score without a key that takes its share of the softmax; null: none
  const float* alibi_slopes;  // [num_heads]: a score is reduced by slope * distance; null: none
  int64_t query_stride;
  int64_t block_table_stride;
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t block_stride;
  int64_t sliding_window;  // 0: none
  int64_t first_key;       // tokens of a context before this one are not attended to
  float scale;
  float soft_cap;  // scores become cap * tanh(score / cap); 0: none
  int32_t num_threads;
  int32_t cache_type;       // CacheType
  int32_t batch_invariant;  // a token's result depends only on its own context, bit for bit
  int32_t bfloat16;         // tiles of many rows are multiplied in bfloat16, unless the cache is float32
  int32_t ahead;            // tokens attend as far ahead as back
  int32_t padding;
  int64_t value_size;  // values are the first ones of each key; 0: they have vectors of their own
};

// What an adapter adds to some outputs of a product, from some of the sums that A makes.
struct AdapterPart {
  int64_t first_output;
  int64_t outputs;
  int64_t first_rank;
  int64_t rank;
  const uint16_t* b;  // bfloat16 [panels of kAdapterPanel outputs][rank][kAdapterPanel], the last one padded with zeros
};

constexpr int64_t kAdapterPanel = 64;

// An adapter's matrices for one linear layer: out += B (A x); adapters.cpp.
struct AdapterWeights {
  int64_t rank;       // of all parts, a multiple of 8: others are padded with zeros
  const uint16_t* a;  // bfloat16 [in][rank]
  int64_t num_parts;
  const AdapterPart* parts;
};

// The adapters of a step's rows.
struct StepAdapters {
  const int32_t* slots;  // [rows]: of each row's adapter; -1: none
  int64_t num_slots;
  int64_t num_linears;
  const AdapterWeights* const* matrices;  // [num_slots][num_linears]; null: nothing is added
};

// The step's row of row r of a product: slots[r] / divisor, or first + r where `slots` is null.
struct AdaptedRows {
  const int64_t* slots;
  int64_t divisor;
  int64_t first;
};

// Where ranks add what each has computed.
enum RankSum : int32_t {
  kQueryNorm = 0, kKeyNorm = 1, kAttention = 2, kMlp = 3, kBlocks = 4, kExpertsBeside = 5, kInputMlp = 6, kStateNorm = 7,
  kState = 8
};

// What a step does besides the layers' own operations. Null members: nothing.
struct StepHooks {
  const StepAdapters* adapters;
  const int64_t* first_linear;  // [layers]: number of each layer's first linear layer
  // Replaces `partial` by the sum over all ranks.
  void (*reduce)(void* context, float* partial, int64_t count, int32_t layer, int32_t cut);
  void* context;
  const float* layer_inputs;  // [tokens], input_stride floats apart: what an InputMLP reads of each token
  int64_t input_stride;
};

// RMS norm, or layer norm if `centered`, over `size` values. weight: null if there is no norm.
struct NormWeights {
  const float* weight;
  const float* bias;  // of a layer norm; null: none
  int64_t size;
  float eps;
  int32_t centered;
  int64_t whole_size;  // of all ranks' values, where ranks divide the norm's; else 0
  int32_t adds;        // whether this rank's values count in the ranks' sum of squares
  int32_t heads;       // rows of weights, one for each head; 0: all heads have the same
};

// A choice of experts by groups; experts.cpp.
struct GroupChoice {
  const float* bias;  // [experts]: added to the scores for the choice, not for the weights; null: none
  int64_t num_groups;
  int64_t top_groups;  // experts of the other groups are not chosen
  int64_t best_of_group;  // a group's score is the sum of as many of its best experts'
  float scale;            // of the weights
  int32_t sigmoid;        // scores are the logits' sigmoids, in place of their softmax
};

// A mixture of experts; experts.cpp. Arrays contain one address per expert; biases may be null.
struct ExpertsWeights {
  const PackedWeight* router;
  const float* router_bias;
  const PackedWeight* const* ups;
  const float* const* up_biases;
  const PackedWeight* const* downs;
  const float* const* down_biases;
  int64_t num_experts;
  int64_t top_k;
  int32_t renormalized;
  int32_t activation;  // Activation
  float limit;         // 0: none
  int32_t gated;
  int32_t padding;
  const GroupChoice* gating;  // null: by the softmax of the logits
  const float* scales;        // [num_experts]: factors of the weights; null: none
  NormWeights norm;           // of the experts' inputs, where the router's differ
  NormWeights router_norm;
  const PackedWeight* before;  // of the experts' inputs, not of the shared expert's; null: none
  const PackedWeight* behind;  // of the experts' sum; set with `before`
  const float* before_bias;
  const float* behind_bias;
};

// An MLP that computes all tokens beside a mixture of experts; biases may be null.
struct SharedExpert {
  const PackedWeight* up;
  const PackedWeight* down;
  const PackedWeight* gate;  // [1][hidden]: its output is multiplied by the sigmoid of this product; null: none
  const float* up_bias;
  const float* down_bias;
  const float* gate_bias;
  int32_t activation;  // Activation
  int32_t gated;
  float limit;  // 0: none
  int32_t padding;
};

// An MLP behind the others of a layer, which multiplies its inner values by the layer's inputs; biases may be null.
struct InputMLP {
  const PackedWeight* up;
  const PackedWeight* down;
  const float* up_bias;
  const float* down_bias;
  NormWeights output_norm;
  int64_t first_input;  // of StepHooks::layer_inputs
  int32_t activation;   // Activation
  int32_t padding;
};

// What attention over latents (MLA, arXiv 2405.04434) has in place of `qkv`; latent.cpp. Biases may be null.
struct LatentWeights {
  const PackedWeight* query_down;  // before query_norm and `query`; null: queries are not compressed
  const PackedWeight* query;       // of each head key_dim values, then shared_size that are rotated
  const PackedWeight* down;        // the latent, then the key that all heads share
  const float* query_down_bias;
  const float* query_bias;
  const float* down_bias;
  const PackedWeight* const* keys;    // [num_heads]: [latent_size][key_dim], from a query to a latent
  const PackedWeight* const* values;  // [num_heads]: [value_dim][latent_size]
  NormWeights query_norm;
  NormWeights latent_norm;
  int64_t latent_size;
  int64_t shared_size;
  int64_t key_dim;
  int64_t value_dim;
};

// Whose keys and values a layer attends to.
enum KeySource : int32_t { kOwnKeys = 0, kValuesAreKeys = 1, kKeysOfAnother = 2 };

// The rows of a step for recurrent layers; recurrent/batch.py.
struct StateRows {
  const int64_t* rows;        // [num_requests]: of the logs
  const int64_t* starts;      // [num_requests + 1]: first token of each
  const int64_t* sources;     // [num_requests]: slots of their states
  const int64_t* num_logged;  // [num_requests]: tokens since their states
  const int64_t* num_accepted;  // [num_requests]: proposed tokens of the row's last step that were kept; null: none
  const int64_t* num_proposed;  // [num_requests]: of its tokens, the last ones, which may be taken back; null: none
  const int64_t* write_starts;  // [num_requests + 1], in the next two: blocks behind the state, rising, and slots
  const int64_t* write_blocks;
  const int64_t* write_slots;
  int64_t num_requests;
  int64_t block_size;
  int64_t slot_stride;  // floats between the states or windows of two slots
  int64_t x_stride;     // floats between two tokens of x
  int32_t num_threads;
  int32_t unused;
};

// A causal convolution of each channel; recurrent.cpp.
struct ConvolutionArgs : StateRows {
  const float* x;
  const float* taps;  // [width][channels]
  const float* bias;  // [channels]; null: none
  float* windows;     // [slots][width - 1][channels]
  float* inputs;      // [rows], input_stride apart: width - 1 values before the last step's proposed tokens, and theirs
  float* out;         // [tokens][channels]
  int64_t channels;
  int64_t width;
  int64_t input_stride;  // floats between two rows
  int32_t activated;  // by silu
  int32_t padding;
};

// A recurrence with a gated norm; recurrent.cpp. With rates: the gated delta rule. Without: a state space, whose rates
// are the steps.
struct RecurrenceArgs : StateRows {
  const float* queries;  // [tokens], x_stride apart as the next two: of all key heads
  const float* keys;
  const float* values;  // of all value heads
  const float* steps;   // [tokens][num_values][decay_values], step_stride apart: what steps are the softplus of
  const float* rates;   // [tokens][num_values], rate_stride apart: what rates are the sigmoid of; null: the steps
  const float* gates;   // [tokens], gate_stride apart: of all value heads
  const float* decays;  // [num_values]: factors of the steps
  const float* biases;  // [num_values][decay_values]: added to `steps`
  const float* skips;   // [num_values]: factors of values in outputs; null: none
  const float* norm;    // weights of the norms, norm_stride apart; null: outputs are only gated
  float* states;        // [slots][num_values][key_dim][value_dim]
  float* log;           // [rows][block_size or more][log_values]: keys, values times rates, decays
  float* out;           // [tokens][num_values][value_dim]
  int64_t step_stride;  // floats between two tokens
  int64_t rate_stride;
  int64_t gate_stride;
  int64_t log_stride;  // floats between two rows
  int64_t log_values;
  int64_t num_keys;
  int64_t num_values;
  int64_t key_dim;
  int64_t value_dim;
  int64_t decay_values;  // 1: a head decays as a whole; key_dim: each channel of its keys by itself
  int64_t norm_size;    // values that are normalised together
  int64_t norm_stride;  // 0: all norms have the same weights
  float eps;            // of the norm
  float least_step;
  float most_step;
  float rate_scale;
  int32_t gates_first;  // whether gates are multiplied in before the norm
  int32_t sigmoid_gates;  // whether that is their sigmoid, in place of silu
};

// What a recurrent layer keeps; step_model.StateArrays in the engine. Strides are floats between two slots or two rows.
struct StateCache {
  float* states;   // [slots][num_values][key_dim][value_dim]
  float* windows;  // [slots][width - 1][channels]
  float* log;      // [rows][tokens][log_values]
  float* inputs;   // [rows][width - 1 or more][channels]
  int64_t state_stride;
  int64_t window_stride;
  int64_t log_stride;
  int64_t input_stride;
};

// A block that keeps a state; recurrent_block.h. Absent parts are null. Without value heads it is a convolution between
// two gates. Numbers named `_at` are those of the first values of a part in a row.
struct RecurrentWeights {
  const PackedWeight* inputs;
  const PackedWeight* rates;  // rates, then steps if these decay whole heads; null: steps are in inputs, rates are steps
  const PackedWeight* steps_down;  // of decays by channel, like the next three: products of products
  const PackedWeight* steps_up;
  const PackedWeight* gates_down;
  const PackedWeight* gates_up;
  const PackedWeight* output;
  const float* inputs_bias;
  const float* rates_bias;
  const float* steps_down_bias;
  const float* steps_up_bias;
  const float* gates_down_bias;
  const float* gates_up_bias;
  const float* output_bias;
  const float* scales;    // [inputs' outputs]: factors
  const float* taps;      // [width][channels]
  const float* tap_bias;  // [channels]
  const float* decays;    // these four: as in RecurrenceArgs
  const float* biases;
  const float* skips;
  const float* gate_norm;
  NormWeights norm;  // before the block
  NormWeights output_norm;
  int64_t channels;
  int64_t width;
  int64_t log_values;
  int64_t num_keys;
  int64_t num_values;
  int64_t key_dim;
  int64_t value_dim;
  int64_t norm_size;
  int64_t norm_stride;
  int64_t mixed_at;  // in inputs, like the next two: what is convolved; of a gated convolution: the gates before
  int64_t gates_at;  // the gates behind
  int64_t steps_at;  // of a gated convolution: the values
  int64_t queries_at;  // in what is convolved, like the next two
  int64_t keys_at;
  int64_t values_at;
  int64_t norm_parts;  // set if ranks divide the parts of `gate_norm`: their number, the first value head here, and
  int64_t first_head;  // the number of all ranks' value heads
  int64_t whole_heads;
  float eps;
  float least_step;
  float most_step;
  float rate_scale;
  float residual_scale;  // of the values added to the residual
  int32_t gates_first;
};

// A decoder layer: attention or a block with a state, or both side by side, and an MLP, experts or both, and perhaps a
// further MLP, each added to the residual stream; layer.cpp. Absent parts are null, and so are absent blocks' `qkv` and
// `latent`, `recurrent`, and `up` and `experts`.
struct LayerWeights {
  const PackedWeight* qkv;  // queries, keys, values, then gates
  const PackedWeight* output;
  const PackedWeight* up;  // if gated, the gate's rows followed by the up projection's
  const PackedWeight* down;
  const float* qkv_bias;
  const float* output_bias;
  const float* up_bias;
  const float* down_bias;
  const float* sinks;  // [num_heads]
  const float* alibi_slopes;  // [num_heads]
  const ExpertsWeights* experts;  // replaces `up` and `down`, or is beside them: both read the same residual
  const SharedExpert* shared;     // beside `experts`
  const RecurrentWeights* recurrent;
  const PackedWeight* head_gates;  // one for each query head
  const float* head_gates_bias;
  NormWeights attention_norm;
  NormWeights query_norm;
  NormWeights key_norm;
  NormWeights attention_output_norm;
  NormWeights mlp_norm;  // null in a parallel layer whose MLP shares the attention's normalised input
  NormWeights mlp_output_norm;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;           // of the attention scores
  float residual_scale;  // of attention's values that are added to the residual
  float mlp_scale;       // of the MLP's
  float limit;           // of the MLP's gate; 0: none
  float clip;            // bound of queries, keys and values before the rotation; 0: none
  float soft_cap;        // of the attention scores; 0: none
  int32_t activation;    // Activation
  int32_t gated;
  int32_t parallel;  // the MLP reads the same hidden states as the attention
  int32_t norms_behind;  // queries and keys are normalised behind the rotation
  int32_t grows;         // queries are multiplied by the step's factors behind the rotation
  int32_t gated_heads;   // attended values are multiplied by the sigmoid of gates in `qkv`
  int32_t first_attention;  // numbers of the blocks' first linear layers, from the layer's first one on
  int32_t first_mlp;
  const LatentWeights* latent;  // replaces `qkv`
  const InputMLP* input_mlp;
  NormWeights value_norm;
  NormWeights attention_residual_norm;  // of the residual stream behind the attention
  NormWeights mlp_residual_norm;        // and behind the MLP
  NormWeights experts_output_norm;      // of experts beside an MLP
  NormWeights sum_norm;                 // of the sum of both
  float factor;          // of the residual stream behind the layer
  int32_t key_source;    // KeySource
  int32_t ahead;         // tokens attend as far ahead as back
};

}  // namespace pagemill
