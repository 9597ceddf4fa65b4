"use strict";
// One event at a time: `pending` is its body, sent unchanged until the server has it on disk.
const $ = (id) => document.getElementById(id);
const PAUSE = 300;  // ms: the second click of a double click must not vote on the next item
const SHOWN = 2000;  // ms that "Saved: …" stays on the screen
const LONGEST = Number(document.body.dataset.longest);  // characters of a comment
let state = null, pending = null, sending = false, delay = 1000, timer = 0, savedTimer = 0;
let name = "", shownAt = 0;

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

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  try {
    const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: AbortSignal.timeout(20000) });
    return [reply.status, await reply.json()];
  } catch {
    return [0, { error: "the server cannot be reached" }];
  }
}

// ---- texts: always as text, never as HTML ----

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function showPrompt(prompt) {  // turns below each other; a line's label, such as "Role:", in bold
  const turns = typeof prompt === "string" ? [{ role: "", content: prompt }] : prompt;
  $("prompt").replaceChildren(...turns.map(({ role, content }) => {
    const turn = element("div", "", "turn"), body = element("div", "", "");
    if (turns.length > 1) turn.append(element("p", role, "role"));
    body.dir = "auto";
    for (const line of content.split(/(?<=\n)/)) {
      const label = (line.match(/^\p{Lu}[^:\n]{0,29}:(?=\s)/u) || [""])[0];
      if (label) body.append(element("b", label, ""));
      body.append(line.slice(label.length));
    }
    turn.append(body);
    return turn;
  }));
}

// ---- drafts: a comment and reasons that were not sent outlive an undo and a reload ----

const draftKey = (item) => ["draft", name, item.number, item.sha256].join("-");
const ticked = () => Array.from(document.querySelectorAll("#reasons input:checked"), (box) => box.value);

function keepDraft() {
  if (state && state.item) tab(draftKey(state.item), JSON.stringify({ comment: $("comment").value, reasons: ticked() }));
}

// ---- the session ----

function begin() {
  trouble("");
  $("name").value = tab("name") || local("name") || "";
  tab("name") ? enter(tab("name")) : view("start", "Compare two answers");
}

async function enter(given) {
  given = given.trim().normalize("NFKC").toLowerCase();  // "Ann" is no second person beside "ann"
  const [status, data] = await call("/next", { annotator: given });
  if (status !== 200) {
    if ($("work").hidden) view("start", "Compare two answers");
    return trouble("Not started: " + data.error + ".", ![400, 403].includes(status));
  }
  name = given;
  tab("name", name);
  local("name", name);
  show(data, "");
  pending = JSON.parse(local("pending-" + name) || "null");  // a vote that a reload or a crash cut off
  if (pending) send();
}

const count = (n, noun) => n + " " + noun + (n === 1 ? "" : "s");

function view(which, title) {
  for (const part of ["start", "work", "end"]) $(part).hidden = part !== which;
  $("progress").hidden = $("steps").hidden = document.querySelector("nav").hidden = which === "start";
  document.body.classList.toggle("reading", which === "work");
  $("title").textContent = title;
  document.title = title + " · FeedbackLoop";
  $("title").focus({ preventScroll: true });
  scrollTo(0, 0);
}

function show(data, words) {
  state = data;
  trouble("");
  lock(false);
  say(words);
  const { item, votes, others, done, all } = data;
  $("bar").max = all || 1;
  $("bar").value = done;
  $("numbers").textContent = count(votes, "vote") + " by you, " + others + " by others";
  $("undo").disabled = !data.undoes;
  $("skip").hidden = !item;
  if (item) {
    const draft = JSON.parse(tab(draftKey(item)) || "null") || item.old || { comment: "", reasons: [] };
    for (const box of document.querySelectorAll("#reasons input")) box.checked = draft.reasons.includes(box.value);
    $("comment").value = draft.comment;
    if (item.old) buttonOf(item.old).classList.add("old");
    showPrompt(item.prompt);
    for (const side of ["left", "right"]) $(side).textContent = item[side];
    for (const id of ["prompt", "left", "right"]) $(id).scrollTop = 0;
    view("work", "Item " + (done + 1) + " of " + all);
  } else {
    $("summary").textContent = "You compared " + count(votes, "pair") + ". You skipped " + (done - votes) + ".";
    view("end", "Thank you, " + name);
  }
  shownAt = performance.now();
}

function trouble(words, again) {
  $("banner").hidden = !words;
  $("trouble").textContent = words;
  $("retry").hidden = !again;
}

function say(words) {  // for two seconds
  clearTimeout(savedTimer);
  $("saved").textContent = words;
  savedTimer = setTimeout(() => { $("saved").textContent = ""; }, SHOWN);
}

function lock(on) {
  for (const button of document.querySelectorAll("[data-choice], #undo")) button.disabled = on;
  $("reasons").inert = $("comment-field").inert = on;
  if (!on) for (const button of document.querySelectorAll(".chosen, .old")) button.classList.remove("chosen", "old");
}

// ---- a vote ----

const buttonOf = ({ choice, strength }) => choice === null || choice === "skip" ? $("skip")
  : document.querySelector('[data-choice="' + choice + '"][data-strength="' + strength + '"]');

const label = (vote) => vote.choice === null ? "skipped" : buttonOf(vote).ariaLabel;

function choose(choice, strength) {
  if (!state || !state.item) return;
  const { number, sha256 } = state.item, skip = choice === "skip";
  const vote = skip ? { event: "skip", choice: null, strength: null } : { event: "vote", choice, strength };
  submit(buttonOf({ choice, strength }), { ...vote, number, sha256, undoes: null, reasons: ticked(), comment: $("comment").value.trim() });
}

function undo() {
  keepDraft();
  if (state && state.undoes) submit($("undo"), { event: "undo", choice: null, strength: null, undoes: state.undoes, reasons: [], comment: "" });
}

function submit(button, body) {
  if (pending || performance.now() - shownAt < PAUSE || tooLong(body.comment)) return;
  pending = { ...body, event_id: newId(), annotator: name, guidelines_sha256: document.body.dataset.guidelines };
  local("pending-" + name, JSON.stringify(pending));
  lock(true);
  button.classList.add("chosen");
  send();
}

function tooLong(text) {  // said while it is written; a limit of the field would cut a pasted text in silence
  const over = Array.from(text).length - LONGEST;
  if (over > 0) trouble("The comment is too long by " + count(over, "character") + ": at most " + LONGEST + ", please.");
  return over > 0;
}

async function send() {
  if (sending || !pending) return;
  sending = true;
  clearTimeout(timer);
  const [status, data] = await call("/vote", pending);
  sending = false;
  if ([200, 400, 403, 409, 413, 415].includes(status)) {  // the server has decided
    const sent = pending;
    pending = null;
    delay = 1000;
    local("pending-" + name, null);
    if (status === 200 && sent.sha256) tab(draftKey(sent), null);
    if (data.done !== undefined) show(data, "");
    else lock(false);
    if (status !== 200) return trouble("Not saved: " + data.error + ".");
    if (sent.event === "undo") return say("Undone: " + label(data.item.old));
    const keys = $("shortcuts").checked && !matchMedia("(pointer: coarse)").matches ? " · u undoes" : "";
    return say("Saved: " + label(sent) + keys);
  }
  trouble("Not saved yet: " + data.error + ". Your choice is kept here and will be sent again.", true);
  timer = setTimeout(send, delay);
  delay = Math.min(delay * 2, 15000);
}

// ---- keys and clicks ----

// The key's name. Where a digit needs Shift (AZERTY), and on a layout without Latin letters, it is
// that of its place on the keyboard. The keypad without NumLock has arrows, and no digits.
function pressed({ key, code }) {
  const place = code.match(/^Digit([123])$|^Key([A-Z])$/), letters = /^[^\P{L}\p{Script=Latin}]+$/u;
  if (place && (place[1] ? !/^\d$/.test(key) : letters.test(key))) return (place[1] || place[2]).toLowerCase();
  return key.length === 1 ? key.toLowerCase() : key;
}

document.addEventListener("keydown", (event) => {
  const { key, code, shiftKey, target } = event;
  if (key === "Escape" && target.closest("textarea")) return $("title").focus();
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || document.querySelector("dialog[open]")) return;
  if (!$("shortcuts").checked || target.closest("textarea, input:not([type=checkbox])")) return;
  if (key.startsWith("Arrow") && target.closest(".words")) return;  // they scroll this text
  const strength = shiftKey && !(/^\d$/.test(key) && code.startsWith("Digit")) ? 3 : 2;  // else Shift made the digit
  const actions = {
    "1": () => choose("left", strength), ArrowLeft: () => choose("left", strength), q: () => choose("left", 1),
    "2": () => choose("right", strength), ArrowRight: () => choose("right", strength), w: () => choose("right", 1),
    "3": () => choose("tie", 0), t: () => choose("tie", 0), b: () => choose("both_bad", 0), s: () => choose("skip"), u: undo,
    c: () => $("work").hidden || $("comment").focus(), g: () => $("guidelines").showModal(), "?": () => $("help").showModal(),
  };
  const action = pressed(event);
  if (!Object.hasOwn(actions, action)) return;
  event.preventDefault();
  if (!event.repeat) actions[action]();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || event.detail > 1) return;
  if (button.dataset.choice) choose(button.dataset.choice, Number(button.dataset.strength));
  if (button.id === "undo") undo();
  if (button.id === "again") enter(name);
  if (button.id === "show-guidelines") $("guidelines").showModal();
  if (button.id === "show-help") $("help").showModal();
  if (button.id === "retry") pending ? send() : begin();
});

$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  enter($("name").value);
});
$("comment").addEventListener("input", () => tooLong($("comment").value) || pending || trouble(""));
$("help").addEventListener("close", () => {
  if ($("help").returnValue !== "leave" || pending) return;
  tab("name", null);
  location.reload();
});

function useShortcuts() {
  document.body.classList.toggle("nokeys", !$("shortcuts").checked);
  local("shortcuts", $("shortcuts").checked ? "on" : "off");
}
$("shortcuts").checked = local("shortcuts") !== "off";
$("shortcuts").addEventListener("change", useShortcuts);
useShortcuts();
window.addEventListener("online", send);
window.addEventListener("pagehide", keepDraft);
begin();
