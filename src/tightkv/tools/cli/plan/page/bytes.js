// Bytes of a model's cache and what fits, as tightkv.model_shape.planner counts them. Sizes of pages come
// from tightkv.pages.layout: DATA.presets has a page's record as slope * head_dim + offset.

const NO_LIMIT = 2 ** 40;
const ceilDiv = (a, b) => (a - (a % b)) / b + (a % b ? 1 : 0);

// --- one layer ---
function shard(layer, ranks) {
  const heads = layer.numKvHeads;
  if (heads && heads % ranks && ranks % heads) {
    throw new Error(
      `${heads} KV heads cannot be shared by ${ranks} ranks; one number must be a multiple of ` +
        "the other",
    );
  }
  return {
    ...layer,
    numKvHeads: heads ? Math.max(1, Math.floor(heads / ranks)) : 0,
    stateBytes: layer.stateBytes === null ? null : ceilDiv(layer.stateBytes, ranks),
  };
}

// Why a layer is not compressed, or null where it is.
function skipReason(layer, integration = "transformers") {
  const latent = layer.kind === "mla" && integration === "vllm" && layer.latentDim > 0;
  if (layer.kind !== "full" && !latent) return DATA.kind_reasons[layer.kind];
  const supported = DATA.supported_extras[integration];
  const extra = layer.extras.find((each) => !supported.includes(each));
  if (extra !== undefined) return extra;
  if (latent) {
    const rank = layer.latentDim - layer.ropeDim;
    if (!DATA.latent_ranks.includes(rank)) {
      return `kv_lora_rank=${rank}; supported: multiples of 64 up to 512`;
    }
    const dims = DATA.latent_rope_dims;
    if (dims.includes(layer.ropeDim)) return null;
    return `qk_rope_head_dim=${layer.ropeDim}; supported: ${dims.join(", ")}`;
  }
  if (layer.headDim !== layer.valueHeadDim) {
    return `keys have ${layer.headDim} dimensions and values ${layer.valueHeadDim}`;
  }
  // A headDim of 0 is not known.
  if (layer.headDim && (layer.headDim < 16 || layer.headDim % 16)) {
    return `head_dim=${layer.headDim}; supported: multiples of 16 from 16 up`;
  }
  return null;
}

// Why no preset compresses a layer; null where TightCache does or, of latents, vLLM.
const keptReason = (layer) =>
  skipReason(layer, layer.kind === "mla" ? "vllm" : "transformers");

const elementsPerToken = (layer) =>
  layer.kind === "mla"
    ? layer.latentDim
    : layer.numKvHeads * (layer.headDim + layer.valueHeadDim);

// A layer that stays uncompressed, at `elementBytes` a number.
function plainCost(layer, elementBytes) {
  const perToken = elementsPerToken(layer) * elementBytes + layer.indexBytes;
  return {
    layer,
    bytesPerToken: layer.kind === "full" || layer.kind === "mla" ? perToken : 0,
    totalBytes: (tokens) => {
      const kept = layer.window === null ? tokens : Math.min(tokens, layer.window);
      return Math.ceil(kept * perToken) + (layer.stateBytes || 0);
    },
  };
}

// A latent of `latentBytes` per token, in blocks of `blockTokens`.
function latentCost(layer, latentBytes, blockTokens) {
  return {
    layer,
    bytesPerToken: latentBytes + layer.indexBytes,
    totalBytes: (tokens) =>
      ceilDiv(tokens, blockTokens) * blockTokens * latentBytes + tokens * layer.indexBytes,
  };
}

// A layer in pages of `preset`.
function pagedCost(layer, preset) {
  const { numKvHeads, headDim } = layer;
  const pageBytes = numKvHeads * (preset.record_slope * headDim + preset.record_offset);
  const ringBytes = numKvHeads * (preset.ring_slope * headDim + preset.ring_offset);
  const sinks = preset.sinks * 2 * numKvHeads * headDim * DATA.exact_element_bytes;
  return {
    layer,
    bytesPerToken: pageBytes / preset.page_size,
    totalBytes: (tokens) => {
      const sealed = Math.floor(Math.max(tokens - preset.seal_lag, 0) / preset.page_size);
      const pages = sealed * (pageBytes + DATA.entry_bytes);
      const ring = Math.min(tokens, preset.ring_tokens) * ringBytes;
      return pages + ring + sinks + DATA.counter_bytes + (layer.stateBytes || 0);
    },
  };
}

// --- the whole cache ---
class CachePlan {
  constructor(name, preset, costs, refusal = null) {
    this.name = name;
    this.preset = preset;
    this.costs = costs;
    this.refusal = refusal;
  }

  get bytesPerToken() {
    return this.costs.reduce((sum, cost) => sum + cost.bytesPerToken, 0);
  }

  // Mean over the layers that can be compressed; null where there is none.
  get bytesPerTokenPerLayer() {
    const costs = this.costs.filter((cost) => keptReason(cost.layer) === null);
    if (!costs.length) return null;
    return costs.reduce((sum, cost) => sum + cost.bytesPerToken, 0) / costs.length;
  }

  totalBytes(tokens, sequences = 1) {
    return sequences * this.costs.reduce((sum, cost) => sum + cost.totalBytes(tokens), 0);
  }

  // The longest single sequence that fits; null where none is too long.
  maxTokens(memory) {
    if (this.totalBytes(NO_LIMIT) <= memory) return null;
    let low = 0;
    let high = NO_LIMIT;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (this.totalBytes(middle) <= memory) low = middle;
      else high = middle;
    }
    return low;
  }

  maxRequests(memory, tokens) {
    return Math.floor(Math.max(0, memory) / Math.max(1, this.totalBytes(tokens)));
  }
}

function baselinePlan(name, layers) {
  return new CachePlan(name, null, layers.map((layer) => baselineCost(name, layer)));
}

function baselineCost(name, layer) {
  if (layer.kind === "mla" && layer.extras.includes(DATA.extras.INDEXED)) {
    const bytes = DATA.indexed_latent_bytes[name];
    return bytes ? latentCost(layer, bytes, 1) : plainCost(layer, DATA.exact_element_bytes);
  }
  const none = layer.kind === "mla" && DATA.not_for_latents.includes(name);
  return plainCost(layer, none ? DATA.exact_element_bytes : DATA.baselines[name]);
}

function presetPlan(name, layers) {
  const preset = DATA.presets[name];
  const { refusal, slope, offset } = preset.latent;
  const isLatent = (layer) => layer.kind === "mla" && keptReason(layer) === null;
  const costs = layers.map((layer) => {
    if (skipReason(layer) === null) return pagedCost(layer, preset);
    if (!isLatent(layer) || refusal) return plainCost(layer, DATA.exact_element_bytes);
    const rope = layer.ropeDim * DATA.exact_element_bytes;
    const bytes = slope * (layer.latentDim - layer.ropeDim) + rope + offset;
    return latentCost(layer, bytes, preset.page_size);
  });
  return new CachePlan(name, preset, costs, layers.some(isLatent) ? refusal : null);
}

// --- weights ---
function weightsDtype(shape) {
  const quantization = shape.config.values.quantization_config;
  if (!isObject(quantization)) return shape.dtype;
  const { quant_method: method, bits } = quantization;
  if (DATA.fp8_methods.includes(method)) return "fp8";
  if (method === "mxfp4" || bits === 4 || quantization.load_in_4bit) return "int4";
  if (bits === 8 || quantization.load_in_8bit) return "int8";
  return null;
}

// Parameters of a standard decoder-only transformer; null where the config does not tell.
function estimateParameters(shape) {
  const cfg = shape.config;
  const matrices = DATA.mlp_matrices[shape.modelType];
  if (matrices === undefined || shape.layers.some((layer) => layer.stateBytes)) return null;
  const needed = matrices === 3 ? ["intermediate_size"] : [];
  if (shape.layers.some((layer) => layer.kind === "mla")) {
    needed.push("qk_nope_head_dim", "v_head_dim");
  }
  if (needed.some((name) => cfg.number(name) === null)) return null;
  const embeddings = cfg.flag("tie_word_embeddings") ? 1 : 2;
  let total = embeddings * shape.vocabSize * shape.hiddenSize;
  if (shape.modelType === "gpt2" || shape.modelType === "gpt_bigcode") {
    total += (shape.maxPositions || 0) * shape.hiddenSize;
  }
  const sparse = sparseLayers(cfg, shape.layers.length);
  shape.layers.forEach((layer, index) => {
    total += attentionParameters(cfg, shape, layer);
    total += mlpParameters(cfg, shape, sparse.has(index), matrices);
  });
  return total;
}

function attentionParameters(cfg, shape, layer) {
  const { hiddenSize: hidden, numHeads: heads } = shape;
  if (layer.kind !== "mla") {
    const queries = heads * (layer.headDim + layer.valueHeadDim);
    return hidden * (queries + elementsPerToken(layer));
  }
  const nope = cfg.need("qk_nope_head_dim");
  const rope = cfg.need("qk_rope_head_dim");
  const value = cfg.need("v_head_dim");
  const rank = cfg.need("kv_lora_rank");
  const queryRank = cfg.number("q_lora_rank");
  const queries = heads * (nope + rope);
  const query = queryRank === null ? hidden * queries : queryRank * (hidden + queries);
  return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden;
}

function mlpParameters(cfg, shape, sparse, matrices) {
  const hidden = shape.hiddenSize;
  const dense = cfg.number("ffn_hidden_size", "n_inner", "intermediate_size") || 4 * hidden;
  const experts = cfg.number("num_local_experts", "num_experts", "n_routed_experts");
  if (experts === null || !sparse) return matrices * hidden * dense;
  const width = cfg.number("moe_intermediate_size") || dense;
  let shared = cfg.number("shared_expert_intermediate_size");
  if (shared === null) shared = (cfg.number("n_shared_experts", { least: 0 }) || 0) * width;
  return hidden * experts + matrices * hidden * (experts * width + shared);
}

// Layers whose MLP has experts, if the model has any.
function sparseLayers(cfg, count) {
  const step = cfg.number("decoder_sparse_step") || 1;
  const first = cfg.number("first_k_dense_replace", { least: 0 }) || 0;
  const dense = new Set(cfg.numbers("mlp_only_layers") || []);
  const isSparse = (i) => i >= first && (i + 1) % step === 0 && !dense.has(i);
  return new Set(fill(count, (i) => i).filter(isSparse));
}

// options.weightsBytes: given. options.parameters: counted. Else estimated, or null.
function planWeights(shape, options) {
  const ranks = options.tp;
  const dtype = options.weightsDtype || null;
  if (options.weightsBytes != null) {
    return { bytes: ceilDiv(options.weightsBytes, ranks), dtype, source: "given" };
  }
  const stored = dtype || weightsDtype(shape);
  let parameters = estimateParameters(shape);
  let source = "estimated";
  if (parameters === null && options.parameters != null) {
    parameters = options.parameters;
    source = "counted";
  }
  if (parameters === null || stored === null) return null;
  const bits = DATA.weight_bits[stored];
  return { bytes: ceilDiv(parameters * bits, 8 * ranks), dtype: stored, source };
}

// --- the report: the object that `tightkv plan --json` prints ---
// options: context, batch, tp, gpu or budgetBytes, utilization, weightsBytes, weightsDtype,
// parameters, name. All but batch and tp may be missing.
function plan(config, given) {
  const options = { batch: 1, tp: 1, ...given };
  const shape = readModelShape(config, options.name);
  const context =
    options.context || Math.min(shape.maxPositions || DATA.context, DATA.context);
  const memory = memoryOf(options);
  const weights = planWeights(shape, options);
  if (weights === null && memory !== null) {
    throw new Error(
      `the weights of ${shape.name} (model_type ${repr(shape.modelType)}) have an unknown ` +
        "size: no estimate for this family; give their size",
    );
  }
  const left = memory && Math.max(0, memory.budget_bytes - weights.bytes);
  const layers = shape.layers.map((layer) => shard(layer, options.tp));
  const plans = [
    ...Object.keys(DATA.baselines).map((name) => baselinePlan(name, layers)),
    ...Object.keys(DATA.presets).map((name) => presetPlan(name, layers)),
  ];
  return {
    schema: 1,
    tightkv: DATA.version,
    model: modelPart(shape, options.tp),
    context,
    batch: options.batch,
    tp: options.tp,
    weights,
    memory: memory && { ...memory, cache_bytes: left },
    rows: plans.map((each) => rowOf(each, plans[0], context, options.batch, left)),
    notes: [...notesOf(shape, context, memory, weights), ...latentNotes(plans, shape)],
    plans,
  };
}

function memoryOf(options) {
  if (options.gpu) {
    const share = options.utilization || DATA.utilization;
    const bytes = Math.trunc(DATA.gpus[options.gpu] * 2 ** 20 * share);
    return { budget_bytes: bytes, gpu: options.gpu, utilization: share };
  }
  if (options.budgetBytes == null) return null;
  const share = options.utilization || 1;
  const bytes = Math.trunc(options.budgetBytes * share);
  return { budget_bytes: bytes, gpu: null, utilization: share };
}

function modelPart(shape, ranks) {
  const groups = new Map();
  for (const layer of shape.layers) {
    const key = JSON.stringify(layer);
    groups.set(key, { layer, count: (groups.get(key) || { count: 0 }).count + 1 });
  }
  const layers = [...groups.values()].map(({ layer, count }) => {
    const own = shard(layer, ranks);
    return {
      kind: own.kind,
      count,
      num_kv_heads: own.numKvHeads,
      head_dim: own.headDim,
      value_head_dim: own.valueHeadDim,
      latent_dim: own.latentDim,
      index_bytes: own.indexBytes,
      window: own.window,
      state_bytes: own.stateBytes,
      compressed: keptReason(own) === null,
      skip_reason: keptReason(own),
    };
  });
  return {
    name: shape.name,
    model_type: shape.modelType,
    num_layers: shape.layers.length,
    num_heads: shape.numHeads,
    hidden_size: shape.hiddenSize,
    dtype: shape.dtype,
    max_positions: shape.maxPositions,
    layers,
  };
}

function rowOf(each, bf16, context, batch, left) {
  const total = each.totalBytes(context, batch);
  const perToken = each.bytesPerToken;
  return {
    name: each.name,
    key_bits: each.preset && each.preset.key_bits,
    value_bits: each.preset && each.preset.value_bits,
    bytes_per_token_per_layer: each.bytesPerTokenPerLayer,
    bytes_per_token: perToken,
    ratio: perToken ? bf16.bytesPerToken / perToken : null,
    total_bytes: total,
    total_ratio: total ? bf16.totalBytes(context, batch) / total : null,
    max_tokens: left === null ? null : each.maxTokens(left),
    max_requests: left === null ? null : each.maxRequests(left, context),
  };
}

function notesOf(shape, context, memory, weights) {
  const notes = [...shape.notes];
  if (shape.dtype === "float32") {
    notes.push("the config says float32; the cache is planned as if the model ran in bf16");
  }
  if (shape.maxPositions !== null && context > shape.maxPositions) {
    notes.push(`context ${context} is beyond the model's limit of ${shape.maxPositions}`);
  }
  if (shape.layers.every((layer) => keptReason(layer) !== null)) {
    notes.push("no layer of this model can be compressed: every preset is the same as bf16");
  }
  notes.push(...vllmNotes(shape));
  if (weights && weights.source === "estimated" && shape.config.nested) {
    notes.push("the estimate of the weights covers the language model only");
  }
  if (memory && weights && weights.bytes >= memory.budget_bytes) {
    notes.push("the weights alone exceed the budget: nothing fits");
  }
  return notes;
}

// What is to be said about the latents (MLA) of a model's plans.
function latentNotes(plans, shape) {
  const latents = shape.layers.filter((layer) => layer.kind === "mla");
  const notes = [];
  if (latents.some((layer) => keptReason(layer) === null)) {
    notes.push(
      "latents (MLA) are compressed in vLLM alone; transformers keeps them in its DynamicCache",
    );
  }
  if (latents.some((layer) => !layer.extras.includes(DATA.extras.INDEXED))) {
    for (const name of DATA.not_for_latents) {
      notes.push(`${name}: vLLM has none for latents (MLA); they are counted at 16 bits`);
    }
  }
  for (const { name, refusal } of plans.filter((each) => each.refusal)) {
    notes.push(`${name}: counted at 16 bits, for the vLLM plugin refuses it: ${refusal}`);
  }
  return notes;
}

// Layers that TightCache compresses and the vLLM plugin does not.
function vllmNotes(shape) {
  const found = new Map();
  for (const layer of shape.layers) {
    const reason = skipReason(layer) === null ? skipReason(layer, "vllm") : null;
    if (reason !== null) found.set(reason, (found.get(reason) || 0) + 1);
  }
  return [...found].map(
    ([reason, count]) =>
      `vLLM leaves ${count} layer${count > 1 ? "s" : ""} more uncompressed (${reason})`,
  );
}
