// A form for the requests of any model, made from the JSON schema of its requests.

const element = (id) => document.getElementById(id);

async function start() {
  const [api, model] = await Promise.all(["openapi.json", "model"].map(async (path) => (await fetch(path)).json()));
  const schemas = api.components.schemas;
  const resolve = (schema) => (schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema);
  const body = api.paths["/predict"].post.requestBody.content["application/json"].schema;
  const schema = resolve(body);

  document.title = model.name;
  element("model").textContent = model.name;
  element("summary").textContent = schema.description ?? "";
  element("command").textContent = model.curl ?? "";
  const fields = Object.entries(schema.properties ?? {}).map(([name, property]) =>
    addField(name, resolve(property), (schema.required ?? []).includes(name), model.example?.[name]));
  element("request").addEventListener("submit", (event) => {
    event.preventDefault();
    send(fields);
  });
}

// Adds a field to the form, and returns its name and a function that reads its value.
function addField(name, property, isRequired, example) {
  const value = example ?? property.default;
  const choices = property.enum;
  const types = property.anyOf ? property.anyOf.map((part) => part.type) : [property.type];
  const type = types.find((part) => part !== "null");
  let input;
  if (choices) {
    input = document.createElement("select");
    input.append(...choices.map((choice) => new Option(choice, choice)));
  } else if (type === "boolean") {
    input = Object.assign(document.createElement("input"), { type: "checkbox", checked: value === true });
  } else if (type === "integer" || type === "number") {
    input = Object.assign(document.createElement("input"), { type: "number", step: type === "integer" ? 1 : "any" });
    const limits = property.anyOf?.find((part) => part.type === type) ?? property;
    if (limits.minimum !== undefined) input.min = limits.minimum;
    if (limits.maximum !== undefined && limits.maximum <= Number.MAX_SAFE_INTEGER) input.max = limits.maximum;
  } else {
    input = document.createElement("textarea");
  }
  input.id = `field-${name}`;
  input.required = isRequired && type !== "boolean";
  const isText = type === "string";
  if (type !== "boolean" && value !== undefined && value !== null) {
    input.value = isText || choices || type === "integer" || type === "number" ? value : JSON.stringify(value);
  }

  const label = document.createElement("label");
  label.htmlFor = input.id;
  label.append(name, isRequired ? "" : " (optional)");
  const hint = document.createElement("small");
  hint.textContent = property.description ? ` ${property.description}` : "";
  label.append(hint);
  element("fields").append(label, input);

  const read = () => {
    if (type === "boolean") return input.checked;
    if (input.value === "") return undefined;
    if (type === "integer" || type === "number") return Number(input.value);
    if (isText || choices) return input.value;
    try {
      return JSON.parse(input.value);
    } catch (error) {
      throw new Error(`${name}: not JSON: ${error.message}`);
    }
  };
  return [name, read];
}

async function send(fields) {
  const button = document.querySelector("button[type=submit]");
  button.disabled = true;
  element("trouble").hidden = true;
  const started = performance.now();
  try {
    const entries = fields.map(([name, read]) => [name, read()]).filter(([, value]) => value !== undefined);
    const response = await fetch("predict", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(Object.fromEntries(entries)),
    });
    const reply = await response.json();
    if (!response.ok) throw new Error(reply.error);
    element("reply").textContent = JSON.stringify(reply, null, 1);
    element("reply").hidden = element("reply-title").hidden = false;
    element("time").textContent = `${Math.round(performance.now() - started)} ms`;
  } catch (error) {
    element("trouble").textContent = error.message;
    element("trouble").hidden = false;
  } finally {
    button.disabled = false;
  }
}

start().catch((error) => {
  element("trouble").textContent = error.message;
  element("trouble").hidden = false;
});
