// The form, the table and the drawings.

const $ = (id) => document.getElementById(id);
const OWN = "own";
const INPUTS = "model gpu budget context batch dtype weights utilization tp".split(" ");
const COLOURS = {
  bf16: "#8b949c", fp8: "#a9b1b8", nvfp4: "#c5cbd0",
  k8v8: "#1f4e79", k8v4: "#2b6cb0", k4v4: "#1a9a8a", k4v3: "#46b17b",
  k3v3: "#8fbf4d", k4v2: "#e0b23c", k3v2: "#e08a3c", k2v2: "#d2563f",
};

// --- numbers as `tightkv plan` prints them ---
// Python rounds an exact half to the even digit.
function fixed(value, digits) {
  const doubled = value * 2 ** (digits + 1);
  if (!Number.isInteger(doubled) || doubled % 2 !== 1) return value.toFixed(digits);
  const low = Math.floor(value * 10 ** digits);
  return ((low % 2 ? low + 1 : low) / 10 ** digits).toFixed(digits);
}

function humanBytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return unit === "B" ? `${size} B` : `${fixed(size, 2)} ${unit}`;
    size /= 1024;
  }
  return `${fixed(size, 2)} TiB`;
}

const whole = (value) => value.toLocaleString("en-US");
const ratio = (value) => (value === null ? "-" : `${fixed(value, 2)}x`);
const perToken = (value) => (Number.isInteger(value) ? whole(value) : fixed(value, 1));

// --- the form ---
function option(value, text) {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  return element;
}

function fillForm() {
  DATA.models.forEach(({ name }) => $("model").append(option(name, name)));
  $("model").append(option(OWN, "another: paste its config.json"));
  for (const [name, mib] of Object.entries(DATA.gpus)) {
    $("gpu").append(option(name, `${name} (${Math.round(mib / 1024)} GiB)`));
  }
  $("gpu").append(option(OWN, "another: give its memory"));
  $("dtype").append(option("", "as the config says"));
  Object.keys(DATA.weight_bits).forEach((name) => $("dtype").append(option(name, name)));
  $("model").value = "Llama 3.1 8B";
  $("gpu").value = "H100";
}

// A number from the form, or null where the field is empty.
function numberOf(id, name, least, most = Infinity, integer = true) {
  const text = $(id).value.trim();
  if (text === "" && $(id).validity.valid) return null;
  const value = Number(text);
  const fits = value >= least && value <= most && (!integer || Number.isSafeInteger(value));
  if (text === "" || !fits) {
    const kind = integer ? "an integer, at least" : "a number, at least";
    const limit = most === Infinity ? "" : ` and at most ${most}`;
    throw new Error(`${name} ${text}; it must be ${kind} ${least}${limit}`);
  }
  return value;
}

function gibibytes(id, name) {
  const value = numberOf(id, name, 0, 2 ** 20, false);
  return value === null ? null : Math.trunc(value * 2 ** 30);
}

function chosenModel() {
  if ($("model").value !== OWN) {
    return DATA.models.find(({ name }) => name === $("model").value);
  }
  const text = $("config").value.trim();
  if (!text) return null;
  try {
    return { config: JSON.parse(text) };
  } catch (error) {
    throw new Error(`the config is not valid JSON: ${error.message}`);
  }
}

function readOptions(model) {
  const ownGpu = $("gpu").value === OWN;
  return {
    name: model.name,
    parameters: model.parameters,
    gpu: ownGpu ? null : $("gpu").value,
    budgetBytes: ownGpu ? gibibytes("budget", "memory") || 0 : null,
    utilization: numberOf("utilization", "share of the memory", 0.01, 1, false),
    context: numberOf("context", "tokens per request", 1, 2 ** 30),
    batch: numberOf("batch", "requests at once", 1, 2 ** 20) || 1,
    tp: numberOf("tp", "tensor-parallel ranks", 1, 1024) || 1,
    weightsDtype: $("dtype").value || null,
    weightsBytes: gibibytes("weights", "weights"),
  };
}

let typing;

function update() {
  $("own").hidden = $("model").value !== OWN;
  $("own-budget").hidden = $("gpu").value !== OWN;
  $("utilization").placeholder = $("gpu").value === OWN ? "1" : String(DATA.utilization);
  let report = null;
  let message = "";
  try {
    const model = chosenModel();
    if (model === null) message = "Paste the config.json of a model, or open the file.";
    else report = plan(model.config, readOptions(model));
    if (report && report.rows.some((row) => !Number.isSafeInteger(row.total_bytes))) {
      throw new Error("more than 8 PiB of cache: give fewer tokens or requests");
    }
  } catch (error) {
    report = null;
    message = error.message;
  }
  $("error").textContent = message;
  $("error").hidden = report !== null;
  $("answer").hidden = report === null;
  if (report !== null) show(report);
  clearTimeout(typing);
  typing = setTimeout(remember, 300); // browsers limit how often an address may change
}

// The form in the address, so that a plan can be sent to somebody.
function remember() {
  const values = INPUTS.map((id) => [id, $(id).value]).filter(([, value]) => value !== "");
  history.replaceState(null, "", "#" + new URLSearchParams(values));
}

function recall() {
  for (const [id, value] of new URLSearchParams(location.hash.slice(1))) {
    if (INPUTS.includes(id)) $(id).value = value;
  }
}

// --- the result ---
function show(report) {
  $("context").placeholder = String(report.context);
  $("headline").textContent = headline(report);
  const { weights, memory } = report;
  const dtype = weights.dtype ? ` ${weights.dtype}` : "";
  const share = `${memory.gpu || "memory"} x ${memory.utilization}`;
  $("memory").textContent =
    `Weights ${humanBytes(weights.bytes)}${dtype} (${weights.source}); memory ` +
    `${humanBytes(memory.budget_bytes)} (${share}); left for the cache ` +
    `${humanBytes(memory.cache_bytes)}.`;
  showTable(report);
  showBars(report);
  drawLines(report);
  list("layers", report.model.layers.map(layerLine));
  list("notes", report.notes.map((note) => `Note: ${note}`));
}

function headline(report) {
  const [bf16, k4v4] = ["bf16", "k4v4"].map((name) => report.rows.find((r) => r.name === name));
  const requests = `requests of ${whole(report.context)} tokens`;
  if (report.model.layers.every((group) => !group.compressed)) {
    const fit = `${whole(bf16.max_requests)} ${requests} fit with bf16`;
    return `${report.model.name}: ${fit}. No layer of this model can be compressed.`;
  }
  return (
    `${report.model.name}: ${whole(k4v4.max_requests)} ${requests} fit with k4v4, ` +
    `${whole(bf16.max_requests)} with bf16. The cache is ${ratio(k4v4.total_ratio)} smaller.`
  );
}

function list(id, lines) {
  $(id).replaceChildren(
    ...lines.map((text) => Object.assign(document.createElement("li"), { textContent: text })),
  );
}

function layerLine(group) {
  const about = [`${group.count} x ${group.kind}`];
  if (group.num_kv_heads) about.push(`${group.num_kv_heads} KV heads of ${group.head_dim}`);
  if (group.latent_dim) about.push(`${group.latent_dim} numbers per token`);
  if (group.index_bytes) about.push(`an index of ${group.index_bytes} bytes per token`);
  if (group.window) about.push(`at most ${whole(group.window)} tokens`);
  if (group.state_bytes) about.push(`state of ${humanBytes(group.state_bytes)} per sequence`);
  const where = group.kind === "mla" ? "compressed in vLLM" : "compressed";
  const kept = group.compressed ? where : `not compressed: ${group.skip_reason}`;
  return `${about.join(", ")} (${kept})`;
}

function showTable(report) {
  const context = whole(report.context);
  const header = [
    "cache",
    "bytes per token",
    "smaller",
    `${whole(report.batch)} x ${context} tokens`,
    "smaller",
    "tokens that fit",
    `requests of ${context}`,
  ];
  const rows = report.rows.map((row) => [
    row.name,
    perToken(row.bytes_per_token),
    ratio(row.ratio),
    humanBytes(row.total_bytes),
    ratio(row.total_ratio),
    row.max_tokens === null ? "no limit" : whole(row.max_tokens),
    whole(row.max_requests),
  ]);
  const cells = (texts, tag) => {
    const line = document.createElement("tr");
    line.append(
      ...texts.map((text) => Object.assign(document.createElement(tag), { textContent: text })),
    );
    return line;
  };
  const body = rows.map((texts, i) => {
    const line = cells(texts, "td");
    line.children[3].title = `${whole(report.rows[i].total_bytes)} bytes`;
    return line;
  });
  $("table").replaceChildren(cells(header, "th"), ...body);
}

function showBars(report) {
  const unlimited = report.rows.some((row) => row.max_tokens === null);
  const values = report.rows.map((row) => (unlimited ? row.total_bytes : row.max_tokens));
  $("bars-title").textContent = unlimited
    ? `Bytes of ${whole(report.batch)} x ${whole(report.context)} tokens`
    : "Tokens that fit, one request";
  const most = Math.max(1, ...values);
  $("bars").replaceChildren(
    ...report.rows.map((row, i) => {
      const bar = document.createElement("div");
      bar.className = "bar";
      const name = document.createElement("span");
      name.textContent = row.name;
      const track = document.createElement("div");
      track.className = "track";
      const fill = document.createElement("div");
      fill.className = "fill";
      fill.style.width = `calc((100% - 6.5rem) * ${values[i] / most})`;
      fill.style.background = COLOURS[row.name];
      const value = document.createElement("span");
      value.className = "value";
      value.textContent = unlimited ? humanBytes(values[i]) : whole(values[i]);
      track.append(fill, value);
      bar.append(name, track);
      return bar;
    }),
  );
}

// --- bytes against context ---
function svg(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// Four or five round steps up to `most`.
function steps(most) {
  const rough = most / 4;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * base).find((s) => s >= rough);
  return fill(Math.floor(most / step) + 1, (i) => i * step);
}

function drawLines(report) {
  const { batch } = report;
  const width = Math.max(280, $("lines").clientWidth || 640);
  const height = 280;
  const [left, right, top, bottom] = [52, 14, 10, 34];
  const longest = 2 * report.context;
  const gib = (each, tokens) => each.totalBytes(tokens, batch) / 2 ** 30;
  const budget = report.memory.cache_bytes / 2 ** 30;
  const highest = 1.05 * Math.max(...report.plans.map((each) => gib(each, longest)), 1e-6);
  const requests = batch === 1 ? "one request" : `${whole(batch)} requests`;
  const dashed = budget < highest ? "; dashed: memory left for the cache" : "";
  $("lines-title").textContent =
    `Cache of ${requests} in GiB, by tokens per request (colours as above${dashed})`;
  const x = (tokens) => left + ((width - left - right) * tokens) / longest;
  const y = (value) => height - bottom - ((height - top - bottom) * value) / highest;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(svg("title", {}, "Bytes of the cache against the tokens of a request"));
  for (const value of steps(highest)) {
    const line = { x1: left, x2: width - right, y1: y(value), y2: y(value) };
    picture.append(svg("line", { ...line, stroke: "var(--line)" }));
    const label = { x: left - 6, y: y(value) + 4, "text-anchor": "end" };
    picture.append(svg("text", label, String(Number(value.toPrecision(3)))));
  }
  const ticks = width < 480 ? [0, 1, 2] : [0, 0.5, 1, 1.5, 2];
  for (const part of ticks) {
    const anchor = part === 2 ? "end" : "middle";
    const label = { x: x(part * report.context), y: height - bottom + 18, "text-anchor": anchor };
    picture.append(svg("text", label, whole(Math.round(part * report.context))));
  }
  for (const each of [...report.plans].reverse()) {
    const points = fill(97, (i) => Math.max(1, Math.round((longest * i) / 96)));
    const path = points.map((tokens) => `${x(tokens).toFixed(1)},${y(gib(each, tokens)).toFixed(1)}`);
    const style = { fill: "none", stroke: COLOURS[each.name], "stroke-width": 2 };
    picture.append(svg("polyline", { points: path.join(" "), ...style }));
  }
  if (budget < highest) {
    const line = { x1: left, x2: width - right, y1: y(budget), y2: y(budget) };
    picture.append(
      svg("line", { ...line, stroke: "var(--text)", "stroke-dasharray": "6 4" }),
    );
  }
  $("lines").replaceChildren(picture);
}

// --- start ---
fillForm();
recall();
for (const event of ["input", "change"]) $("form").addEventListener(event, update);
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) $("config").value = await file.text();
  update();
});
let resized;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(update);
});
update();
