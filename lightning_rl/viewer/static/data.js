// What the page asks: a server's JSON, or the same answers that a report carries with it.

const answers = globalThis.LIGHTNING_RL_ANSWERS ?? null;

export function isReport() {
  return answers !== null;
}

export async function ask(path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  words.sort();
  const place = words.size ? `${path}?${words}` : path;
  if (answers !== null) {
    if (place in answers) return answers[place];
    throw new Error("this report does not hold it: open the run with lightning-rl dashboard");
  }
  let answer;
  try {
    answer = await fetch(`/api/${place}`);
  } catch {
    throw new Error("the dashboard does not answer: it was ended, or its machine is away. Start it again with lightning-rl dashboard");
  }
  if (answer.status === 401) location.assign("/login");
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ?? `it was answered ${answer.status}`);
  return told;
}

export function holds(path) {
  return answers === null || path in answers;
}

export function ofRun(run, path) {
  return `runs/${encodeURIComponent(run)}/${path}`;
}

export function link(run, view, name, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const place = ["#", "run", encodeURIComponent(run), view, ...(name ? [encodeURIComponent(name)] : [])].join("/");
  return words.size ? `${place}?${words}` : place;
}
