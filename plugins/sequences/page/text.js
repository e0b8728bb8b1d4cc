// Shows a text while it is written: in short requests, each continuing the previous one.

const CHARACTERS_PER_REQUEST = 20;
const LONGEST_PROMPT = 2000;
const element = (id) => document.getElementById(id);
let isStopped = false;

async function start() {
  const model = await (await fetch("model")).json();
  document.title = model.name;
  element("model").textContent = model.name;
  element("command").textContent = model.curl ?? "";
  element("prompt").value = model.example?.prompt ?? "";
  element("request").addEventListener("submit", (event) => {
    event.preventDefault();
    write();
  });
  element("stop").addEventListener("click", () => {
    isStopped = true;
  });
}

async function write() {
  const button = document.querySelector("button[type=submit]");
  const wanted = Number(element("characters").value);
  const seed = Number(element("seed").value);
  let text = element("prompt").value;
  const start = text.length;
  button.disabled = true;
  element("stop").disabled = false;
  element("trouble").hidden = true;
  isStopped = false;
  const started = performance.now();
  try {
    for (let part = 0; text.length - start < wanted && !isStopped; part += 1) {
      const response = await fetch("predict", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          prompt: text.slice(-LONGEST_PROMPT),
          characters: Math.min(CHARACTERS_PER_REQUEST, wanted - (text.length - start)),
          temperature: Number(element("temperature").value),
          seed: seed + part,
        }),
      });
      const reply = await response.json();
      if (!response.ok) throw new Error(reply.error);
      if (reply.text === "") break;
      text += reply.text;
      element("text").textContent = text;
      const seconds = (performance.now() - started) / 1000;
      element("time").textContent = `${text.length - start} characters, ${Math.round((text.length - start) / seconds)} per second`;
    }
  } catch (error) {
    element("trouble").textContent = error.message;
    element("trouble").hidden = false;
  } finally {
    button.disabled = false;
    element("stop").disabled = true;
  }
}

start().catch((error) => {
  element("trouble").textContent = error.message;
  element("trouble").hidden = false;
});
