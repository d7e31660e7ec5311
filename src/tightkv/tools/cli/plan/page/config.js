// A model's config.json as the layers of its KV cache, as tightkv.model_shape reads it.
// DATA has the tables of that package.

class ModelConfig {
  constructor(values, name, nested) {
    this.values = values;
    this.name = name;
    this.nested = nested;
    this.modelType = String(values.model_type || "");
  }

  // The first of `names` that is present and not null, else null.
  first(...names) {
    for (const name of names) if (this.values[name] != null) return this.values[name];
    return null;
  }

  wrong(name, allowed) {
    return new Error(
      `${name}=${shortRepr(this.values[name])} of ${this.name}; allowed: ${allowed}`,
    );
  }

  // As `first`, checked to be a whole number; {least, most} may follow the names.
  number(...names) {
    const { least, most } = { least: 1, most: DATA.most, ...names.find(isObject) };
    const name = names.find((n) => this.values[n] != null);
    if (name === undefined) return null;
    const value = this.values[name];
    if (!Number.isInteger(value) || value < least || value > most) {
      throw this.wrong(name, `a whole number from ${least} to ${most}`);
    }
    return value;
  }

  // A value that is null or passes the check.
  checked(name, allowed, check) {
    const value = this.first(name);
    if (value !== null && !check(value)) throw this.wrong(name, allowed);
    return value;
  }

  flag(name) {
    return this.checked(name, "true or false", (v) => [false, true, 0, 1].includes(v));
  }

  text(name) {
    return this.checked(name, "a string", (v) => typeof v === "string");
  }

  record(name) {
    return this.checked(name, "an object", isObject);
  }

  words(name) {
    const isWord = (item) => typeof item === "string";
    return this.checked(name, "a list of strings", (v) => Array.isArray(v) && v.every(isWord));
  }

  numbers(name) {
    const isCount = (item) => typeof item === "boolean" || (Number.isInteger(item) && item >= 0);
    const allowed = "a list of whole numbers";
    return this.checked(name, allowed, (v) => Array.isArray(v) && v.every(isCount));
  }

  need(...names) {
    const value = this.number(...names);
    if (value === null) {
      throw new Error(
        `the config of ${this.name} (model_type ${repr(this.modelType)}) has no ` +
          names.filter((name) => !isObject(name)).join(" or "),
      );
    }
    return value;
  }
}

// A JSON value as Python writes it.
function repr(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return value.includes("'") ? `"${value}"` : `'${value}'`;
  if (Array.isArray(value)) return `[${value.map(repr).join(", ")}]`;
  if (typeof value !== "object") return String(value);
  const items = Object.entries(value).map(([key, item]) => `${repr(key)}: ${repr(item)}`);
  return `{${items.join(", ")}}`;
}

function shortRepr(value) {
  const text = repr(value);
  return text.length <= 60 ? text : `${text.slice(0, 50)}... (${text.length} characters)`;
}

const isObject = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value);
const fill = (count, rule) => Array.from({ length: count }, (_, i) => rule(i));

// The language model inside a config, with the defaults of its family.
function textPart(whole, name) {
  let part = whole;
  let nested = false;
  for (;;) {
    const key = DATA.text_parts.find((k) => part[k] != null);
    if (key === undefined) break;
    const inner = { ...new ModelConfig(part, name, nested).record(key) };
    for (const shared of DATA.shared) {
      if (inner[shared] == null && part[shared] != null) inner[shared] = part[shared];
    }
    if (!("model_type" in inner)) inner.model_type = part.model_type;
    part = inner;
    nested = true;
  }
  const family = new ModelConfig(part, name, nested).text("model_type") || "";
  const defaults = {
    ...(nested ? DATA.nested_defaults[family] : {}),
    ...DATA.defaults[family],
  };
  return new ModelConfig({ ...defaults, ...part }, name, nested);
}

// {name, modelType, layers, numHeads, hiddenSize, vocabSize, dtype, maxPositions, notes, config}
function readModelShape(whole, name) {
  if (!isObject(whole)) throw new Error("a config is a JSON object");
  const cfg = textPart(
    whole,
    String(name || whole._name_or_path || whole.model_type || "model"),
  );
  refuseModelsWithoutCache(cfg);
  const notes = [];
  const numHeads = cfg.need("num_attention_heads", "n_head", "n_heads", MOST_HEADS);
  const hiddenSize = cfg.need("hidden_size", "n_embd", "d_model", "n_embed");
  const layers = readLayers(cfg, numHeads, hiddenSize, notes);
  cfg.record("quantization_config");
  return {
    name: cfg.name,
    modelType: cfg.modelType,
    layers,
    numHeads,
    hiddenSize,
    vocabSize: cfg.need("vocab_size"),
    dtype: dtypeOf(cfg, notes),
    maxPositions: maxPositions(cfg),
    notes,
    config: cfg,
  };
}

function refuseModelsWithoutCache(cfg) {
  const type = repr(cfg.modelType);
  if (cfg.flag("is_encoder_decoder")) {
    throw new Error(
      `${cfg.name} is an encoder-decoder model (model_type ${type}); only decoder-only models ` +
        "are supported",
    );
  }
  const masked = (cfg.words("architectures") || []).some((a) => a.endsWith("ForMaskedLM"));
  const reason = DATA.refused[cfg.modelType] || (masked ? DATA.refused.bert : null);
  if (reason && !cfg.flag("is_decoder")) {
    throw new Error(`${cfg.name} (model_type ${type}) has no KV cache: ${reason}`);
  }
  if (cfg.first("vocab_size") === null) {
    throw new Error(
      `the config of ${cfg.name} has no vocab_size: it is not that of a language model`,
    );
  }
}

// --- which kind each layer is ---
const MOST_LAYERS = { most: DATA.most_layers };
const MOST_HEADS = { most: DATA.most_heads };
const MOST_DIM = { most: DATA.most_dim };
const numLayers = (cfg) => cfg.need("num_hidden_layers", "n_layer", "n_layers", MOST_LAYERS);

function layerKinds(cfg) {
  return withoutOwnCache(cfg, allKinds(cfg));
}

// The same, with layers that read another layer's cache as if they had their own.
function allKinds(cfg) {
  refuseFields(cfg, DATA.adds_to_attention);
  let kinds = listedKinds(cfg);
  if (kinds === null) {
    refuseFields(cfg, DATA.not_understood);
    refuseUnreadLists(cfg);
    for (const way of [
      kindsOfPattern,
      kindsOfIndices,
      kindsOfPeriod,
      (c) => every(c, c.number("full_attention_interval"), "linear"),
      (c) => (c.modelType === "falcon_h1" ? fill(numLayers(c), () => "hybrid") : null),
      kindsWithoutRope,
      kindsOfWindows,
    ]) {
      kinds = way(cfg);
      if (kinds !== null) break;
    }
  }
  kinds = kinds || fill(numLayers(cfg), () => "full");
  if (!kinds.length || kinds.length > DATA.most_layers) {
    throw new Error(
      `${cfg.name} has ${kinds.length} layers; allowed: 1 to ${DATA.most_layers}`,
    );
  }
  return kinds;
}

// Layers whose cache the last layers read: the last before those, of each kind.
function layersReadByOthers(cfg) {
  const kinds = allKinds(cfg);
  const border = kinds.length - sharedLayers(cfg, kinds);
  const own = kinds.slice(0, border);
  return new Set(kinds.slice(border).map((kind) => own.lastIndexOf(kind)));
}

function listedKinds(cfg) {
  for (const field of ["layer_types", "layers_block_type"]) {
    const names = cfg.words(field);
    if (names === null) continue;
    const unknown = names.find((name) => !(name in DATA.layer_names));
    if (unknown !== undefined) {
      throw new Error(
        `${field} of ${cfg.name} has a layer of kind ${repr(unknown)}, which is not ` +
          `understood; supported: ${Object.keys(DATA.layer_names).join(", ")}`,
      );
    }
    if (cfg.modelType !== "nemotron_h" && names.length !== numLayers(cfg)) {
      throw new Error(
        `${field} of ${cfg.name} names ${names.length} layers, but there are ${numLayers(cfg)}`,
      );
    }
    return names.map((name) => DATA.layer_names[name]);
  }
  return null;
}

function kindsOfPattern(cfg) {
  const pattern = cfg.text("hybrid_override_pattern");
  if (pattern === null) return null;
  return [...pattern].map((letter) => {
    if (!(letter in DATA.pattern)) {
      throw new Error(
        `hybrid_override_pattern of ${cfg.name} has a layer of kind ${repr(letter)}, which is ` +
          `not understood; supported: ${Object.keys(DATA.pattern).join(" ")}`,
      );
    }
    return DATA.pattern[letter];
  });
}

function kindsOfIndices(cfg) {
  let indices = cfg.numbers("attn_layer_indices") || cfg.numbers("full_attn_idxs");
  if (indices === null && cfg.modelType === "bamba") indices = [];
  if (indices === null) return null;
  const full = new Set(indices);
  return fill(numLayers(cfg), (i) => (full.has(i) ? "full" : "linear"));
}

function kindsOfPeriod(cfg) {
  if (cfg.modelType !== "jamba") return null;
  const period = cfg.need("attn_layer_period");
  const offset = cfg.number("attn_layer_offset", { least: 0 }) || 0;
  return fill(numLayers(cfg), (i) => (i % period === offset ? "full" : "linear"));
}

// Llama 4: layers with RoPE see their own chunk only, the others everything.
function kindsWithoutRope(cfg) {
  if (cfg.first("attention_chunk_size") === null) return null;
  const flags = cfg.numbers("no_rope_layers");
  if (flags && flags.length) {
    if (flags.length !== numLayers(cfg)) {
      throw cfg.wrong("no_rope_layers", `a number for each of ${numLayers(cfg)} layers`);
    }
    return flags.map((flag) => (flag ? "chunked" : "full"));
  }
  const kinds = every(cfg, cfg.number("no_rope_layer_interval"), "chunked");
  return kinds || fill(numLayers(cfg), () => "chunked");
}

// The sliding window, or null where it is off.
function windowSize(cfg) {
  const off = cfg.flag("use_sliding_window");
  if ((off !== null && !off) || cfg.first("sliding_window") === 0) return null;
  return cfg.number("sliding_window");
}

function kindsOfWindows(cfg) {
  const window = windowSize(cfg);
  if (window === null) return null;
  const pattern = cfg.first("sliding_window_pattern");
  if (typeof pattern === "string") {
    if (!/^[LG]+$/.test(pattern)) {
      throw new Error(
        `sliding_window_pattern=${repr(pattern)} of ${cfg.name}; supported: L (local) and G`,
      );
    }
    return fill(numLayers(cfg), (i) =>
      pattern[i % pattern.length] === "L" ? "sliding" : "full",
    );
  }
  if (pattern !== null) return every(cfg, cfg.number("sliding_window_pattern"), "sliding");
  const slides = slidesRule(cfg, window);
  return fill(numLayers(cfg), (i) => (slides(i) ? "sliding" : "full"));
}

function slidesRule(cfg, window) {
  if (DATA.all_slide.includes(cfg.modelType)) return () => true;
  const border = cfg.number("max_window_layers", { least: 0 });
  if (border === null) {
    throw new Error(
      `sliding_window=${window} of ${cfg.name}, but neither its config nor its model_type ` +
        `${repr(cfg.modelType)} says which layers slide; add layer_types to the config`,
    );
  }
  if (cfg.modelType === "qwen2_moe") return (layer) => layer % 2 === 0 && layer < border;
  return (layer) => layer >= border;
}

// Every `period`-th layer is full, the rest `other`.
function every(cfg, period, other) {
  if (period === null) return null;
  return fill(numLayers(cfg), (i) => ((i + 1) % period ? other : "full"));
}

function withoutOwnCache(cfg, kinds) {
  const firstShared = kinds.length - sharedLayers(cfg, kinds);
  const crossing = new Set(cfg.numbers("cross_attention_layers") || []);
  return kinds.map((kind, i) => (i >= firstShared || crossing.has(i) ? "none" : kind));
}

function sharedLayers(cfg, kinds) {
  return cfg.number("num_kv_shared_layers", { least: 0, most: kinds.length }) || 0;
}

function refuseFields(cfg, fields) {
  for (const field of fields) {
    if (cfg.first(field) !== null) {
      throw new Error(
        `${field}=${shortRepr(cfg.first(field))} of ${cfg.name} changes what its layers keep, ` +
          "and it is not supported; use layer_types instead",
      );
    }
  }
}

function refuseUnreadLists(cfg) {
  const layers = cfg.first("num_hidden_layers", "n_layer", "n_layers");
  for (const [field, value] of Object.entries(cfg.values)) {
    if (DATA.unrelated_lists.includes(field)) continue;
    if (!Array.isArray(value) || value.length !== layers) continue;
    if (value.every((entry) => typeof entry === "string")) {
      const kinds = [...new Set(value)].sort().join(", ");
      throw new Error(
        `${field} of ${cfg.name} names a kind for each layer (${kinds}), and this field is not ` +
          "understood; only layer_types and layers_block_type are",
      );
    }
  }
}

// --- what each layer keeps ---
function readLayers(cfg, numHeads, hiddenSize, notes) {
  const kinds = layerKinds(cfg);
  const heads = kvHeads(cfg, numHeads);
  const headDim = headDimOf(cfg, numHeads, hiddenSize);
  const state = stateBytes(cfg, hiddenSize, numHeads, headDim);
  const recurrent = kinds.some((kind) => kind === "linear" || kind === "hybrid");
  if (state === null && recurrent) {
    notes.push("the config does not give the size of the recurrent state; counted as 0");
  }
  if (state !== null && !recurrent && cfg.first(...DATA.says_layers) === null) {
    throw new Error(
      `${cfg.name} (model_type ${repr(cfg.modelType)}) has recurrent layers, but its config does ` +
        "not say which; add layer_types to it",
    );
  }
  const window = usefulWindow(cfg, kinds, notes);
  const shared = layersReadByOthers(cfg);
  const latent = cfg.first("kv_lora_rank") === null ? null : latentLayer(cfg, kinds);
  const valueHeadDim = cfg.number("v_head_dim", MOST_DIM);
  const layers = kinds.map((kind, index) => {
    const [ownHeads, ownDim] = layerOverride(cfg, index, kind, heads, headDim);
    const valueDim = valueHeadDim || ownDim;
    const attention = (name, limit, own, extras = []) =>
      layer(name, ownHeads, ownDim, valueDim, limit, own, extras);
    if (kind === "none") return layer("none", 0, 0, 0, null, 0);
    if (kind === "linear") return layer("linear", 0, 0, 0, null, state);
    if (latent !== null) return latent;
    if (kind === "indexed") {
      throw new Error(
        `layer ${index} of ${cfg.name} is of kind 'indexed_attention' without a latent ` +
          "(kv_lora_rank), which is not understood",
      );
    }
    if (kind === "sliding" && window === null) {
      return attention("full", null, 0, [DATA.extras.WINDOW]);
    }
    if (kind === "sliding") return attention("sliding", window, 0);
    if (kind === "chunked") return attention("chunked", cfg.need("attention_chunk_size"), 0);
    const extras = extrasOf(cfg, shared.has(index));
    return attention("full", null, kind === "hybrid" ? state : 0, extras);
  });
  noteEmptyLayers(cfg, notes);
  return layers;
}

function layer(kind, numKvHeads, headDim, valueHeadDim, window, stateBytes, extras = []) {
  const sizes = { numKvHeads, headDim, valueHeadDim, latentDim: 0, ropeDim: 0, indexBytes: 0 };
  return { kind, ...sizes, window, stateBytes, extras };
}

// What a layer of full attention needs beyond the causal mask.
function extrasOf(cfg, readByOthers) {
  const found = readByOthers ? [DATA.extras.SHARED] : [];
  if (DATA.alibi_families.includes(cfg.modelType) || cfg.flag("alibi")) {
    found.push(DATA.extras.ALIBI);
  }
  if (DATA.sink_families.includes(cfg.modelType)) found.push(DATA.extras.SINKS);
  return found;
}

function kvHeads(cfg, numHeads) {
  if (cfg.flag("multi_query") && !cfg.flag("new_decoder_architecture")) return 1;
  const names = ["num_key_value_heads", "num_kv_heads", "n_head_kv"];
  const heads = cfg.number(...names, MOST_HEADS) || numHeads;
  if (numHeads % heads && cfg.first("kv_lora_rank") === null) {
    throw new Error(
      `${numHeads} query heads of ${cfg.name} are not a multiple of its ${heads} KV heads`,
    );
  }
  return heads;
}

function headDimOf(cfg, numHeads, hiddenSize) {
  if (cfg.first("kv_lora_rank") !== null) return 0;
  const dim = cfg.number("head_dim", "attention_head_dim", MOST_DIM);
  if (dim !== null) return dim;
  if (hiddenSize % numHeads) {
    throw new Error(
      `the config of ${cfg.name} has no head_dim, and hidden_size=${hiddenSize} is not a ` +
        `multiple of ${numHeads} heads`,
    );
  }
  if (hiddenSize / numHeads > DATA.most_dim) {
    throw cfg.wrong("hidden_size", `at most ${DATA.most_dim} for each of ${numHeads} heads`);
  }
  return hiddenSize / numHeads;
}

function layerOverride(cfg, index, kind, heads, headDim) {
  const values = (cfg.record("per_layer_config") || {})[index];
  if (values != null) {
    if (!isObject(values)) {
      throw cfg.wrong("per_layer_config", "an object with an object for each layer");
    }
    const own = new ModelConfig(values, `layer ${index} of ${cfg.name}`, cfg.nested);
    const ownHeads = own.number("num_key_value_heads", MOST_HEADS);
    return [ownHeads || heads, own.number("head_dim", MOST_DIM) || headDim];
  }
  if (kind === "full" && cfg.first("global_head_dim") !== null) {
    if (cfg.flag("attention_k_eq_v")) {
      heads = cfg.number("num_global_key_value_heads", MOST_HEADS) || heads;
    }
    return [heads, cfg.need("global_head_dim", MOST_DIM)];
  }
  return [heads, headDim];
}

// DeepSeek's latent and the shared RoPE key; an index as vLLM keeps it.
function latentLayer(cfg, kinds) {
  const rank = cfg.need("kv_lora_rank", MOST_DIM);
  const rope = cfg.need("qk_rope_head_dim", MOST_DIM);
  const index = cfg.number("index_head_dim", MOST_DIM) || 0;
  const has = (...names) => kinds.some((kind) => names.includes(kind));
  const found = {
    INDEXED: index || has("indexed"),
    BESIDE_OTHERS: has("linear", "hybrid"),
    LATENT_WINDOW: has("sliding", "chunked"),
  };
  const extras = Object.keys(found).filter((name) => found[name]);
  return {
    ...layer("mla", 0, 0, 0, null, 0, extras.map((name) => DATA.extras[name])),
    latentDim: rank + rope,
    ropeDim: rope,
    indexBytes: index + Math.floor(index / 128) * 4,
  };
}

// The window, or null where no allowed sequence outgrows it.
function usefulWindow(cfg, kinds, notes) {
  if (!kinds.includes("sliding")) return null;
  const window = windowSize(cfg);
  const longest = maxPositions(cfg);
  if (window === null) {
    throw new Error(`${cfg.name} has sliding layers but its config has no sliding_window`);
  }
  if (longest !== null && window >= longest) {
    notes.push(
      `sliding_window=${window} never slides within max_position_embeddings=${longest}: ` +
        "its layers grow like full attention, and are not compressed",
    );
    return null;
  }
  return window;
}

function noteEmptyLayers(cfg, notes) {
  const shared = cfg.number("num_kv_shared_layers", { least: 0 });
  if (shared) {
    notes.push(`the last ${shared} layers read the cache of earlier ones and hold none`);
  }
  const crossing = cfg.numbers("cross_attention_layers") || [];
  if (crossing.length) {
    notes.push(
      `${crossing.length} cross-attention layers hold the image's keys and values, which do ` +
        "not grow with the text; not counted",
    );
  }
}

function maxPositions(cfg) {
  return cfg.number("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx");
}

function dtypeOf(cfg, notes) {
  for (const field of ["dtype", "torch_dtype"]) {
    const value = cfg.first(field);
    if (value === null) continue;
    const text = repr(value).replace(/^'(torch\.)?|'$/g, "");
    if (!(text in DATA.dtypes)) throw cfg.wrong(field, Object.keys(DATA.dtypes).join(", "));
    return DATA.dtypes[text];
  }
  notes.push("the config names no dtype; bfloat16 is assumed");
  return "bfloat16";
}

// --- constant states of convolution, Mamba and linear-attention layers ---
function stateBytes(cfg, hiddenSize, numHeads, headDim) {
  if (cfg.first("linear_num_value_heads") !== null) return deltaNetBytes(cfg);
  if (cfg.first("conv_L_cache") !== null) {
    return hiddenSize * cfg.need("conv_L_cache") * DATA.conv_bytes;
  }
  if (cfg.first("mamba_n_groups", "mamba_ngroups", "n_groups") !== null) {
    return mamba2Bytes(cfg, hiddenSize);
  }
  if (cfg.first("mamba_d_state") !== null) {
    const inner = cfg.need("mamba_expand") * hiddenSize;
    return (
      inner * cfg.need("mamba_d_conv") * DATA.conv_bytes +
      inner * cfg.need("mamba_d_state") * DATA.recurrent_bytes
    );
  }
  if (cfg.modelType === "minimax") return numHeads * headDim * headDim * DATA.recurrent_bytes;
  return null;
}

function deltaNetBytes(cfg) {
  const keyHeads = cfg.need("linear_num_key_heads");
  const keyDim = cfg.need("linear_key_head_dim");
  const valueHeads = cfg.need("linear_num_value_heads");
  const valueDim = cfg.need("linear_value_head_dim");
  const channels = 2 * keyHeads * keyDim + valueHeads * valueDim;
  return (
    channels * cfg.need("linear_conv_kernel_dim") * DATA.conv_bytes +
    valueHeads * keyDim * valueDim * DATA.recurrent_bytes
  );
}

function mamba2Bytes(cfg, hiddenSize) {
  const heads = cfg.need("mamba_n_heads", "mamba_num_heads", "n_mamba_heads");
  let inner = cfg.number("mamba_d_ssm");
  if (cfg.first("mamba_num_heads") !== null) inner = heads * cfg.need("mamba_head_dim");
  if (inner === null) inner = cfg.need("mamba_expand", "expand") * hiddenSize;
  const groups = cfg.need("mamba_n_groups", "mamba_ngroups", "n_groups");
  const states = cfg.need("mamba_d_state", "ssm_state_size");
  const conv = (inner + 2 * groups * states) * cfg.need("mamba_d_conv", "conv_kernel");
  return conv * DATA.conv_bytes + inner * states * DATA.recurrent_bytes;
}
