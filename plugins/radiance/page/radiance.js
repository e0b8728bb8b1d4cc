// Shows views that the server renders, and turns the object with the mouse.
const TURNS_PER_PIXEL = 1 / 480; // a full turn for a drag of 480 pixels
const V_PER_PIXEL = 1 / 600;
const KEY_STEP_PIXELS = 20;
const LOWEST_V = 0.02; // straight from above, no direction of the image is up
const HIGHEST_V = 0.98;
const element = (id) => document.getElementById(id);

const view = { label: 0, u: 0.1, v: 0.35, seed: 0 };
let isBusy = false; // one request at a time
let isStale = false; // the view has changed since the request was sent
let renders = 0;

start();

async function start() {
  const canvas = element("view");
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    grip = { x: event.clientX, y: event.clientY };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!grip) return;
    turn(event.clientX - grip.x, event.clientY - grip.y);
    grip = { x: event.clientX, y: event.clientY };
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { grip = null; });
  canvas.addEventListener("keydown", (event) => {
    const [right, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (right === undefined) return;
    event.preventDefault();
    turn(right * KEY_STEP_PIXELS, down * KEY_STEP_PIXELS);
  });

  element("controls").addEventListener("submit", (event) => event.preventDefault());
  element("seed").addEventListener("input", () => {
    if (!element("seed").validity.valid) return;
    view.seed = Number(element("seed").value);
    refresh();
  });
  element("another").addEventListener("click", () => {
    view.seed = Math.floor(Math.random() * 2 ** 31);
    element("seed").value = view.seed;
    refresh();
  });
  try {
    element("model").textContent = (await (await fetch("model")).json()).name;
  } catch (error) {
    report(`The server does not answer: ${error.message}`);
  }
  refresh();
}

// The object follows the mouse: dragged to the right, its front moves to the right.
function turn(right, down) {
  view.u = (((view.u - right * TURNS_PER_PIXEL) % 1) + 1) % 1;
  view.v = Math.min(HIGHEST_V, Math.max(LOWEST_V, view.v - down * V_PER_PIXEL));
  refresh();
}

// Requests the present view; while an answer is awaited, only the newest view is remembered.
async function refresh() {
  isStale = true;
  if (isBusy) return;
  isBusy = true;
  while (isStale) {
    isStale = false;
    await render({ ...view });
  }
  isBusy = false;
}

async function render(requested) {
  const started = performance.now();
  try {
    const response = await fetch("predict", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(requested),
    });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error);
    draw(body);
    describe(requested, body, performance.now() - started);
    report("");
  } catch (error) {
    report(error.message);
  }
}

function draw({ side, rgb }) {
  const bytes = Uint8Array.from(atob(rgb), (character) => character.charCodeAt(0));
  const pixels = new ImageData(side, side);
  for (let pixel = 0; pixel < side * side; pixel += 1) {
    pixels.data.set(bytes.subarray(3 * pixel, 3 * pixel + 3), 4 * pixel);
    pixels.data[4 * pixel + 3] = 255;
  }
  const canvas = element("view");
  canvas.width = side;
  canvas.height = side;
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function describe({ label, u, v }, { classes }, milliseconds) {
  renders += 1;
  document.body.dataset.renders = renders;
  const elevation = Math.asin(1 - 2 * v) * 180 / Math.PI;
  element("pose").textContent = `Azimuth ${Math.round(360 * u)}°, elevation ${Math.round(elevation)}°`;
  element("speed").textContent = `Rendered in ${Math.round(milliseconds)} ms`;
  if (element("classes").children.length !== classes.length) addClasses(classes);
  for (const [number, button] of [...element("classes").children].entries()) {
    button.setAttribute("aria-checked", number === label);
  }
}

function addClasses(names) {
  element("classes").replaceChildren(...names.map((name, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => { view.label = number; refresh(); });
    return button;
  }));
}

function report(text) {
  element("trouble").hidden = !text;
  element("trouble").textContent = text;
}
