// Asks the server for grasps and draws what it answers: the server says where every box of the hand is.
import {
  AmbientLight, BoxGeometry, BufferAttribute, BufferGeometry, Color, DirectionalLight, EdgesGeometry, Group,
  LineBasicMaterial, LineSegments, Matrix4, Mesh, MeshLambertMaterial, OrbitControls, PerspectiveCamera, Points,
  PointsMaterial, Scene, WebGLRenderer,
} from "./three.min.js";

const POINTS = 256; // of a cloud, as many as in training
const MM = 0.001;
const by = (id) => document.getElementById(id);
const colour = (name) => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color; // light or dark, as the page is
  probe.remove();
  return new Color(found);
};

let view = null; // what is drawn with; nothing without WebGL
let answer = null;
let shown = 0;

start();

async function start() {
  try {
    view = stage();
  } catch (error) {
    trouble(`This browser draws nothing in three dimensions: ${error.message}`);
  }
  for (const [id, text] of [["edge", (value) => `${value} mm`], ["steps", (value) => value]]) {
    const say = () => { by(`${id}-shown`).textContent = text(by(id).value); };
    by(id).addEventListener("input", say);
    say();
  }
  by("edge").addEventListener("input", () => { answer = null; by("answer").hidden = true; draw(); });
  by("all").addEventListener("change", draw);
  by("controls").addEventListener("submit", (event) => { event.preventDefault(); make(); });
  try {
    const about = await (await fetch("model")).json();
    by("model").textContent = about.name;
    by("steps-label").hidden = about.settings.steps === undefined;
    by("steps").max = about.settings.steps ?? 1;
    by("steps").dispatchEvent(new Event("input"));
  } catch (error) {
    trouble(`The server does not answer: ${error.message}`);
  }
  await make();
}

async function make() {
  const edge = by("edge").value * MM;
  const question = { cloud: cloud(edge, +by("seed").value), grasps: +by("count").value, seed: +by("seed").value, edge, boxes: true };
  if (!by("steps-label").hidden) question.steps = +by("steps").value;
  by("make").disabled = true;
  trouble("");
  const began = performance.now();
  try {
    const response = await fetch("predict", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question),
    });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error);
    answer = { ...body, edge, cloud: question.cloud };
    shown = Math.max(0, body.grasps.findIndex((grasp) => grasp.verdict === "strict"));
    report(performance.now() - began);
  } catch (error) {
    trouble(error.message);
  } finally {
    by("make").disabled = false;
  }
  draw();
}

function report(milliseconds) {
  const count = (verdict) => answer.grasps.filter((grasp) => grasp.verdict === verdict).length;
  const strict = count("strict");
  by("answer").hidden = false;
  const clamped = answer.grasps.filter((grasp) => grasp.clamped).length;
  by("summary").textContent =
    `${strict} strict and ${count("valid")} more valid of ${answer.grasps.length}, in ${Math.round(milliseconds)} ms`
    + (clamped ? `; joints of ${clamped} were beyond their limits` : "");
  by("chosen").replaceChildren(...answer.grasps.map((grasp, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = grasp.clamped ? `${grasp.verdict} clamped` : grasp.verdict;
    if (grasp.clamped) button.title = beyond(grasp);
    button.textContent = number + 1;
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => { shown = number; draw(); });
    return button;
  }));
}

// The sentence about joints that were predicted beyond their limits.
function beyond(grasp) {
  return `A joint was ${grasp.clamped_degrees.toFixed(1)}° beyond its limit, and is shown at the limit.`;
}

function trouble(text) {
  by("trouble").hidden = !text;
  by("trouble").textContent = text;
}

// Points drawn uniformly from the faces of a cube around the origin, the same ones for the same seed.
function cloud(edge, seed) {
  let state = seed >>> 0;
  const random = () => { // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
  return Array.from({ length: POINTS }, () => {
    const point = [random(), random(), random()].map((share) => (share - 0.5) * edge);
    point[Math.floor(random() * 3)] = (random() < 0.5 ? -1 : 1) * edge / 2;
    return point;
  });
}

function stage() {
  const renderer = new WebGLRenderer({ canvas: by("view"), antialias: true, alpha: true });
  renderer.setPixelRatio(Math.min(devicePixelRatio, 2));
  const camera = new PerspectiveCamera(40, 1, 0.01, 10);
  camera.up.set(0, 0, 1);
  camera.position.set(0.36, -0.325, 0.18);
  const scene = new Scene();
  const sun = new DirectionalLight(0xffffff, 2.2);
  sun.position.set(0.4, -0.6, 1);
  scene.add(new AmbientLight(0xffffff, 1.6), sun);
  const things = new Group();
  scene.add(things);
  const controls = new OrbitControls(camera, renderer.domElement);
  controls.target.set(0, 0, -0.025); // between the object and the palm below it
  controls.update();
  controls.minDistance = 0.1;
  controls.maxDistance = 1.5;
  const render = () => renderer.render(scene, camera);
  controls.addEventListener("change", render);
  const fit = () => {
    const { clientWidth: width, clientHeight: height } = by("view").parentElement;
    renderer.setSize(width, height, false);
    camera.aspect = width / height;
    camera.fov = width < 1.2 * height ? 46 : 40;
    camera.updateProjectionMatrix();
    render();
  };
  new ResizeObserver(fit).observe(by("view").parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return { renderer, things, render };
}

function draw() {
  for (const [number, button] of [...by("chosen").children].entries()) {
    button.setAttribute("aria-checked", number === shown);
  }
  if (answer) {
    const grasp = answer.grasps[shown];
    by("facts").textContent =
      `Grasp ${shown + 1}: ${grasp.verdict}, ${grasp.depth_mm.toFixed(1)} mm deep, ${grasp.links} links within 5 mm`
      + (grasp.clamped ? `. ${beyond(grasp)}` : "");
  }
  if (!view) return;
  view.things.traverse((thing) => { thing.geometry?.dispose(); thing.material?.dispose(); });
  view.things.clear();
  const edge = answer?.edge ?? by("edge").value * MM;
  view.things.add(...cube(edge), points(answer?.cloud ?? cloud(edge, +by("seed").value)));
  if (answer) {
    const others = by("all").checked ? answer.grasps.filter((_, number) => number !== shown) : [];
    for (const grasp of others) view.things.add(hand(grasp, 0.035));
    view.things.add(hand(answer.grasps[shown], 1));
  }
  view.render();
  document.body.dataset.triangles = view.renderer.info.render.triangles;
}

function cube(edge) {
  const box = new BoxGeometry(edge, edge, edge);
  const lines = new LineSegments(new EdgesGeometry(box), new LineBasicMaterial({ color: colour("soft") }));
  const body = new Mesh(box, new MeshLambertMaterial({ color: colour("accent"), transparent: true, opacity: 0.35, depthWrite: false }));
  return [body, lines];
}

function points(places) {
  const geometry = new BufferGeometry();
  geometry.setAttribute("position", new BufferAttribute(new Float32Array(places.flat()), 3));
  return new Points(geometry, new PointsMaterial({ color: colour("ink"), size: 0.0022 }));
}

function hand(grasp, opacity) {
  const group = new Group();
  const mixed = colour("hand").lerp(colour(grasp.verdict), opacity < 1 ? 1 : 0.35); // the verdict is a tinge of the one that is chosen
  const material = new MeshLambertMaterial({ color: mixed, transparent: opacity < 1, opacity, depthWrite: opacity === 1 });
  const line = new LineBasicMaterial({ color: colour(grasp.verdict) });
  grasp.boxes.forEach((place, number) => {
    const geometry = new BoxGeometry(...answer.half_sizes[number].map((half) => 2 * half));
    const parts = [new Mesh(geometry, material)];
    if (opacity === 1) parts.push(new LineSegments(new EdgesGeometry(geometry), line));
    for (const part of parts) {
      part.applyMatrix4(new Matrix4().set(...place.flat())); // both by rows
      group.add(part);
    }
  });
  return group;
}
