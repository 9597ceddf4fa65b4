"use strict";
// One event at a time: `pending` is its body, sent unchanged until the server has it on disk.
const $ = (id) => document.getElementById(id);
const PAUSE = 300;  // ms: the second click of a double click must not vote on the next item
const LONGEST = 4096;  // bytes of a comment
const session = newId();
const thumbs = document.body.dataset.thumbs === "yes";  // one answer at a time, good or bad
const TITLE = thumbs ? "Judge an answer" : "Compare two answers";
let state = null, pending = null, sending = false, delay = 1000, timer = 0;
let name = "", shownAt = 0, active = 0, activeSince = 0;

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

function keep(store, key, value) {  // private windows may refuse
  try {
    if (value === undefined) return store().getItem(key);
    value === null ? store().removeItem(key) : store().setItem(key, value);
  } catch { }
  return null;
}
const local = (key, value) => keep(() => localStorage, key, value);
const tab = (key, value) => keep(() => sessionStorage, key, value);

function element(kind, words, classes) {
  const made = document.createElement(kind);
  made.textContent = words;
  made.className = classes || "";
  return made;
}

async function call(path, body) {
  const headers = { "Content-Type": "application/json", "X-Token": document.body.dataset.token };
  try {
    const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: AbortSignal.timeout(20000) });
    return [reply.status, await reply.json()];
  } catch {
    return [0, { error: "The server cannot be reached." }];
  }
}

// ---- text: Markdown and code become elements, never HTML ----

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/u;

function words(parent, text) {  // characters that hide or turn text around are shown by their number
  for (const part of text.split(new RegExp("(" + HIDDEN.source + ")", "u"))) {
    if (!HIDDEN.test(part)) parent.append(part);
    else parent.append(element("span", "U+" + part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0"), "control"));
  }
  return parent;
}

function inline(parent, text) {
  const marks = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*]+?)\*(?!\w)/su;
  for (let found; (found = text.match(marks)); text = text.slice(found.index + found[0].length)) {
    words(parent, text.slice(0, found.index));
    if (found[2] !== undefined) parent.append(words(element("code", ""), found[2]));
    else parent.append(inline(element(found[3] !== undefined ? "strong" : "em", ""), found[3] ?? found[4]));
  }
  return words(parent, text);
}

function block(kind, text) {
  const made = inline(element(kind, ""), text);
  made.dir = "auto";
  return made;
}

function render(target, text) {
  target.replaceChildren();
  if (!$("format").checked) {
    const made = words(element("div", ""), text);
    made.dir = "auto";
    return target.append(made);
  }
  const lines = text.split("\n");
  while (lines.length) {
    const line = lines.shift();
    const fence = line.match(/^\s*(```+|~~~+)/);
    const heading = line.match(/^#{1,6}\s+(.*)/), item = line.match(/^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)/), quote = line.match(/^>\s?(.*)/);
    if (fence) {
      const code = [];
      while (lines.length && !lines[0].trim().startsWith(fence[1])) code.push(lines.shift());
      lines.shift();
      const made = element("pre", "");
      made.append(words(element("code", ""), code.join("\n")));
      target.append(made);
    } else if (heading) {
      target.append(block("h3", heading[1]));
    } else if (item) {
      const kind = item[1] ? "OL" : "UL", last = target.lastElementChild;
      const list = last && last.tagName === kind ? last : target.appendChild(element(kind, ""));
      if (!list.children.length && item[1]) list.start = Number(item[1]);
      list.dir = "auto";
      list.append(block("li", item[2]));
    } else if (quote) {
      target.append(block("blockquote", quote[1]));
    } else if (line.trim()) {
      const paragraph = [line];
      while (lines.length && lines[0].trim() && !/^(\s*(```|~~~|[-*+]\s|\d{1,9}[.)]\s)|#{1,6}\s|>)/.test(lines[0])) paragraph.push(lines.shift());
      target.append(block("p", paragraph.join("\n")));
    } else if (target.lastElementChild && /^[OU]L$/.test(target.lastElementChild.tagName) && !/^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[0] || "")) {
      target.append(element("div", ""));  // a blank line ends a list
    }
  }
}

function showItem(item) {
  $("prompt").replaceChildren(...item.prompt.map((turn) => {
    const made = element("div", "", "turn"), content = element("div", "");
    if (item.prompt.length > 1) made.append(element("p", turn.role, "role"));
    render(content, turn.content);
    made.append(content);
    return made;
  }));
  render($("left"), item.left);
  render($("right"), item.right);
}

// ---- the session ----

function begin() {
  trouble("");
  $("name").value = tab("name") || local("name") || "";
  if (tab("name")) enter(tab("name"), true);
  else view("start", TITLE);
}

async function enter(given, sure) {
  const [status, data] = await call("/next", given);
  if (status !== 200 && $("start").hidden && $("work").hidden) view("start", TITLE);
  if (status === 400) return trouble("This pseudonym is not accepted: " + data.error + ".");
  if (status === 403) return renew(data.error);
  if (status !== 200) return trouble(data.error, true);
  if (!sure && data.done) {  // somebody has already voted under this name
    trouble("");
    $("known-words").textContent = given + " has " + data.done + (data.done === 1 ? " vote" : " votes") + ": continue as " + given + "?";
    $("known").hidden = false;
    return $("continue").focus();
  }
  name = given;
  tab("name", name);
  local("name", name);
  show(data, "");
  pending = JSON.parse(local("pending-" + name) || "null");  // a vote that a reload or a crash cut off
  if (pending) send();
}

function renew(words) {  // the server was restarted: a new page brings the new token, once
  if (Date.now() - Number(tab("renewed")) < 10000) return trouble(words, true);
  tab("renewed", String(Date.now()));
  location.reload();
}

function view(which, title) {
  for (const part of ["start", "work", "end"]) $(part).hidden = part !== which;
  $("progress").hidden = $("steps").hidden = document.querySelector("nav").hidden = which === "start";
  document.body.classList.toggle("reading", which === "work");
  $("title").textContent = title;
  document.title = title + " · FeedbackLoop";
  $("title").focus({ preventScroll: true });
  scrollTo(0, 0);
}

function show(data, said) {
  state = data;
  trouble("");
  lock(false);
  const { item, others } = data;
  $("bar").max = data.all || 1;
  $("bar").value = data.done;
  $("everyone").textContent = name + " · " + data.everyone + (data.everyone === 1 ? " vote" : " votes") + " in total";
  $("undo").disabled = !data.undoes;
  $("skip").hidden = !item;
  document.body.dataset.step = data.step;
  for (const box of document.querySelectorAll("#reasons input")) box.checked = Boolean(item && item.reasons.includes(box.value));
  $("comment").value = item ? item.comment : "";  // of a vote that was undone
  if (item) {
    showItem(item);
    for (const id of ["prompt", "left", "right"]) $(id).scrollTop = 0;
    view("work", "Item " + (data.done + 1) + " of " + data.all);
    document.body.classList.remove("fresh");
    void document.body.offsetWidth;  // restarts the fade
    document.body.classList.add("fresh");
  } else {
    const pairs = data.done - others.skip;
    const compared = "You compared " + pairs + (pairs === 1 ? " pair: " : " pairs: ") + data.decided + " decided, "
      + others.tie + (others.tie === 1 ? " tie, " : " ties, ") + others.both_bad + " both bad.";
    const judged = "You judged " + pairs + (pairs === 1 ? " answer." : " answers.");
    $("numbers").textContent = (thumbs ? judged : compared) + " You skipped " + others.skip + ".";
    view("end", "Thank you, " + name);
  }
  $("live").textContent = said + " " + $("title").textContent;
  shownAt = performance.now();
  active = 0;
  activeSince = document.hidden ? 0 : shownAt;
}

document.addEventListener("visibilitychange", () => {
  const now = performance.now();
  if (activeSince) active += now - activeSince;
  activeSince = document.hidden ? 0 : now;
});

function trouble(words, again) {
  $("banner").hidden = !words;
  $("trouble").textContent = words;
  $("retry").hidden = !again;
  return false;
}

function lock(on) {
  for (const button of document.querySelectorAll("[data-choice], #undo")) button.disabled = on;
  for (const field of document.querySelectorAll("#why input, #why textarea")) field.disabled = on;
  if (!on) for (const button of document.querySelectorAll(".chosen")) button.classList.remove("chosen");
}

function choose(choice, strength) {
  if (!state || !state.item) return;
  const button = document.querySelector('[data-choice="' + choice + '"]' + (choice === "skip" ? "" : '[data-strength="' + strength + '"]'));
  if (!button) return;  // with thumbs there is no tie and no strength
  submit(button, choice === "skip"
    ? { event: "skip", item: state.item.item, choice: null, strength: null, undoes: null }
    : { event: "vote", item: state.item.item, choice, strength, undoes: null });
}

function undo() {
  if (state && state.undoes) submit($("undo"), { event: "undo", item: null, choice: null, strength: null, undoes: state.undoes });
}

function submit(button, body) {
  const now = performance.now();
  if (pending || now - shownAt < PAUSE) return;
  const comment = body.event === "undo" ? "" : $("comment").value.trim();
  if (new TextEncoder().encode(comment).length > LONGEST) return trouble("The comment is too long: at most " + LONGEST + " bytes, please.");
  const reasons = body.event === "undo" ? [] : Array.from(document.querySelectorAll("#reasons input:checked"), (box) => box.value);
  pending = {
    ...body, event_id: newId(), annotator: name, session, step: state.step, reasons, comment,
    ms_active: Math.round(active + (activeSince ? now - activeSince : 0)), ms_wall: Math.round(now - shownAt),
    ts_client: new Date().toISOString(), guidelines_sha256: document.body.dataset.guidelines,
  };
  local("pending-" + name, JSON.stringify(pending));
  lock(true);
  button.classList.add("chosen");
  send();
}

async function send() {
  if (sending || !pending) return;
  sending = true;
  clearTimeout(timer);
  const [status, data] = await call("/vote", pending);
  sending = false;
  if ([200, 400, 409, 413, 415].includes(status)) {
    const what = pending.event === "undo" ? "Undone." : "Saved.";
    pending = null;
    delay = 1000;
    local("pending-" + name, null);
    if (status === 200) return show(data, what);
    if (data.item !== undefined) show(data, data.error);
    lock(false);
    return trouble("Not saved: " + data.error);
  }
  if (status === 403) return renew(data.error);
  trouble("Not saved yet: " + data.error + " Your choice is kept here and will be sent again automatically.", true);
  timer = setTimeout(send, delay);
  delay = Math.min(delay * 2, 15000);
}

function typing(target) {
  return target.closest("textarea, input:not([type=checkbox]), select");
}

document.addEventListener("keydown", (event) => {
  const { key, code, shiftKey } = event;
  if (key === "Escape" && event.target.id === "comment") return $("title").focus();
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  if (!$("shortcuts").checked || typing(event.target) || document.querySelector("dialog[open]")) return;
  if (key.startsWith("Arrow") && event.target.closest(".words")) return;  // they scroll this text
  const strong = shiftKey && !thumbs ? 3 : 2;
  const digit = code.match(/^(?:Digit|Numpad)([123])$/);
  const what = digit ? digit[1] : key.length === 1 ? key.toLowerCase() : key;
  const actions = {
    "1": () => choose("left", strong), ArrowLeft: () => choose("left", strong), q: () => choose("left", 1),
    "2": () => choose("right", strong), ArrowRight: () => choose("right", strong), w: () => choose("right", 1),
    "3": () => choose("tie", 0), t: () => choose("tie", 0), b: () => choose("both_bad", 0), s: () => choose("skip"),
    u: undo, c: () => $("work").hidden || $("comment").focus(), g: () => $("guidelines").showModal(), "?": () => $("help").showModal(),
  };
  if (!Object.hasOwn(actions, what)) return;
  event.preventDefault();
  if (!event.repeat) actions[what]();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || event.detail > 1) return;
  if (button.dataset.choice) choose(button.dataset.choice, Number(button.dataset.strength));
  if (button.id === "undo") undo();
  if (button.id === "again") enter(name, true);
  if (button.id === "continue") enter($("name").value.trim(), true);
  if (button.id === "rename") { $("known").hidden = true; $("name").select(); }
  if (button.id === "show-guidelines") $("guidelines").showModal();
  if (button.id === "show-help") $("help").showModal();
  if (button.id === "retry") pending ? send() : begin();
});

$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  $("known").hidden = true;
  enter($("name").value.trim(), false);
});
$("help").addEventListener("close", () => {
  if ($("help").returnValue !== "leave" || pending) return;
  tab("name", null);
  location.reload();
});
$("shortcuts").addEventListener("change", () => {
  local("shortcuts", $("shortcuts").checked ? "on" : "off");
  document.body.classList.toggle("nokeys", !$("shortcuts").checked);
});
$("shortcuts").checked = local("shortcuts") !== "off";
document.body.classList.toggle("nokeys", !$("shortcuts").checked);
$("format").addEventListener("change", () => {
  local("format", $("format").checked ? "on" : "off");
  if (state && state.item) showItem(state.item);
});
$("format").checked = local("format") !== "off";
window.addEventListener("online", send);
begin();
