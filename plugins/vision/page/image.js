// Asks the classifier for the class of an image that is drawn or dropped, after every change.

const WIDTH = 320; // of the field on the screen, in pixels
const MOST_ROWS = 10;
const element = (id) => document.getElementById(id);
const canvas = element("grid");
let context;
let channels;
let example;
let classes = [];
let isPending = false;
let hasChanged = false;

async function start() {
  const model = await (await fetch("model")).json();
  example = model.example.image;
  classes = model.classes;
  channels = example.length;
  canvas.height = example[0].length;
  canvas.width = example[0][0].length;
  canvas.style.width = `${WIDTH}px`;
  canvas.style.height = `${(WIDTH * canvas.height) / canvas.width}px`;
  context = canvas.getContext("2d", { willReadFrequently: true });
  document.title = model.name;
  element("model").textContent = model.name;
  element("command").textContent = model.curl ?? "";
  clear();

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    draw(event);
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && draw(event));
  canvas.addEventListener("dragover", (event) => event.preventDefault());
  canvas.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) show(event.dataTransfer.files[0]);
  });
  element("file").addEventListener("change", (event) => event.target.files.length && show(event.target.files[0]));
  element("clear").addEventListener("click", clear);
  element("example").addEventListener("click", showExample);
  if (location.hash === "#example") showExample();
}

function clear() {
  context.fillStyle = "#000";
  context.fillRect(0, 0, canvas.width, canvas.height);
  element("label").textContent = "Nothing is drawn yet.";
  element("probabilities").replaceChildren();
}

// Paints a soft spot: pixels of training images are grey at the edges of strokes, too.
function draw(event) {
  const box = canvas.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * canvas.width;
  const y = ((event.clientY - box.top) / box.height) * canvas.height;
  const radius = Math.max(0.9, canvas.width / 16);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let row = 0; row < canvas.height; row += 1) {
    for (let column = 0; column < canvas.width; column += 1) {
      const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y);
      const level = 255 * Math.max(0, 1 - distance / (1.4 * radius));
      const place = 4 * (row * canvas.width + column);
      for (let channel = 0; channel < 3; channel += 1) {
        pixels.data[place + channel] = Math.min(255, Math.max(pixels.data[place + channel], level * 1.6));
      }
    }
  }
  context.putImageData(pixels, 0, 0);
  changed();
}

async function show(file) {
  try {
    const image = await createImageBitmap(file);
    // Transparent pixels are white, as in the training.
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    changed();
  } catch {
    complain(`${file.name} is not an image that this browser can read`);
  }
}

function showExample() {
  const pixels = context.createImageData(canvas.width, canvas.height);
  for (let row = 0; row < canvas.height; row += 1) {
    for (let column = 0; column < canvas.width; column += 1) {
      const place = 4 * (row * canvas.width + column);
      for (let channel = 0; channel < 3; channel += 1) {
        pixels.data[place + channel] = 255 * example[Math.min(channel, channels - 1)][row][column];
      }
      pixels.data[place + 3] = 255;
    }
  }
  context.putImageData(pixels, 0, 0);
  changed();
}

// Returns the pixels as the model reads them: channels, rows, columns, from 0 to 1.
function pixelsOfModel() {
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const level = (row, column, channel) => {
    const place = 4 * (row * canvas.width + column);
    if (channels === 1) return (data[place] + data[place + 1] + data[place + 2]) / 765;
    return data[place + Math.min(channel, 2)] / 255;
  };
  return Array.from({ length: channels }, (_, channel) =>
    Array.from({ length: canvas.height }, (__, row) =>
      Array.from({ length: canvas.width }, (___, column) => Math.min(1, level(row, column, channel)))));
}

// Sends the newest image, one request at a time.
async function changed() {
  hasChanged = true;
  if (isPending) return;
  isPending = true;
  element("trouble").hidden = true;
  while (hasChanged) {
    hasChanged = false;
    try {
      const response = await fetch("predict", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ image: pixelsOfModel() }),
      });
      const reply = await response.json();
      if (!response.ok) throw new Error(reply.error);
      showClasses(reply);
    } catch (error) {
      complain(error.message);
    }
  }
  isPending = false;
}

function showClasses(reply) {
  element("label").textContent = `Class ${reply.name ?? reply.label}, ${(100 * reply.probabilities[reply.label]).toFixed(1)} %`;
  const order = reply.probabilities.map((probability, label) => [probability, label]).sort((a, b) => b[0] - a[0]);
  element("probabilities").replaceChildren(...order.slice(0, MOST_ROWS).map(([probability, label]) => {
    const row = document.createElement("tr");
    const meter = Object.assign(document.createElement("meter"), { min: 0, max: 1, value: probability });
    const cells = [document.createElement("th"), document.createElement("td"), document.createElement("td")];
    cells[0].textContent = classes[label] ?? label;
    cells[1].append(meter);
    cells[2].textContent = `${(100 * probability).toFixed(1)} %`;
    row.append(...cells);
    return row;
  }));
}

function complain(message) {
  element("trouble").textContent = message;
  element("trouble").hidden = false;
}

start().catch((error) => complain(error.message));
