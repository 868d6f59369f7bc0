// Python in a worker: answers { id, request } with { id, answer }, and says how far it is with { status }.
import { loadPyodide } from "./python/pyodide.mjs";

const ROOM = "/commplan";
const here = (name) => new URL(name, import.meta.url).href;
const status = (text) => self.postMessage({ status: text });

async function started() {
  status("Python is being loaded (13 MB, once)");
  const python = await loadPyodide({ indexURL: here("./python/") });
  status("commplan is being loaded");
  const wheels = await (await fetch(here("./python/wheels.json"))).json();
  await python.loadPackage(
    wheels.map((name) => here(`./python/${name}`)),
    { messageCallback: () => {} },
  );
  const sources = await (await fetch(here("./sources.zip"))).arrayBuffer();
  python.unpackArchive(sources, "zip", { extractDir: ROOM });
  status("commplan is being imported");
  python.runPython(`import sys; sys.path.insert(0, "${ROOM}")`);
  return python.pyimport("look").look;
}

const ready = started();
ready.then(
  () => self.postMessage({ ready: true }),
  (error) => self.postMessage({ failed: String(error) }),
);

self.onmessage = async ({ data }) => {
  const look = await ready;
  try {
    self.postMessage({ id: data.id, answer: JSON.parse(look(JSON.stringify(data.request))) });
  } catch (error) {
    self.postMessage({ id: data.id, failed: String(error) });
  }
};
