"use strict";
// One event at a time: `pending` is its body, sent unchanged until the server has it on disk.
const $ = (id) => document.getElementById(id);
const PAUSE = 300;  // ms: the second click of a double click must not vote on the next item
const LONGEST = { comment: Number($("comment").dataset.longest), "corrected answer": Number($("comment").dataset.longestEdit) };  // characters
const SIDES = { left: "A", right: "B" };
const session = newId();
const kind = document.body.dataset.kind;  // pairs; criteria: one answer, each rated
const TITLE = $("title").textContent;
let state = null, pending = null, sending = false, delay = 1000, timer = 0;
let name = "", key = "", shownAt = 0, active = 0, activeSince = 0;

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
// The key of a pseudonym is a cookie, and no localStorage, so that it holds at every port.
const cookie = (name) => "annotate-" + encodeURIComponent(name);
const keyOf = (name) => decodeURIComponent(document.cookie.split("; ").find((c) => c.startsWith(cookie(name) + "="))?.split("=")[1] || "");
const lines = (text) => text.replace(/\r\n?/g, "\n");  // as a text field has them
const tab = (key, value) => keep(() => sessionStorage, key, value);

async function call(path, body) {
  const headers = { "Content-Type": "application/json", "X-Token": document.body.dataset.token };
  try {
    const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: AbortSignal.timeout(20000) });
    return [reply.status, await reply.json()];
  } catch {
    return [0, { error: "The server cannot be reached." }];
  }
}

function showTurns(target, turns) {
  target.replaceChildren(...turns.map((turn) => {
    const made = element("div", "", "turn"), content = element("div", "");
    if (turns.length > 1) made.append(element("p", turn.role, "role"));
    render(content, turn.content, $("format").checked);
    made.append(content);
    return made;
  }));
}

function showItem(item) {
  const turns = typeof item.prompt === "string" ? [{ role: "prompt", content: item.prompt }] : item.prompt.slice();
  if (item.reference) turns.push({ role: "reference", content: item.reference });
  showTurns($("prompt"), turns);
  for (const side of ["left", "right"]) render($(side), item[side], $("format").checked);
}

// ---- criteria ----

const RATINGS = { yes: "Yes", no: "No", none: "Can’t tell" };

function showCriteria(item) {
  $("criteria").replaceChildren(...Object.entries(item.criteria).map(([id, text]) => {
    const group = element("fieldset", "", "criterion"), legend = element("legend", text);
    legend.dir = "auto";
    group.dataset.id = id;
    group.append(legend, ...Object.entries(RATINGS).map(([value, words]) => {
      const label = element("label", ""), box = element("input", "");
      Object.assign(box, { type: "radio", name: "criterion-" + id, value });
      box.checked = Boolean(item.ratings) && id in item.ratings && (item.ratings[id] || "none") === value;
      label.append(box, words);
      return label;
    }));
    return group;
  }));
}

const rated = (group) => group.querySelector(":checked");
const ratingOf = (group) => rated(group).value === "none" ? null : rated(group).value;
const groups = () => Array.from(document.querySelectorAll(".criterion"));

function current() {  // the criterion that has the focus, or the first one without a rating
  return document.activeElement.closest(".criterion") || groups().find((group) => !rated(group));
}

function move(by) {
  const all = groups(), group = all[all.indexOf(current()) + by];
  if (group) (rated(group) || group.querySelector("input")).focus();
}

function rate(value) {
  const group = current();
  if (!group || pending) return;
  group.querySelector('[value="' + value + '"]').checked = true;
  const next = groups().find((other) => !rated(other));
  next ? next.querySelector("input").focus() : document.querySelector('[data-choice="rated"]').focus();
}

function ratings() {  // {number: rating}, or undefined if one is missing
  const missing = groups().find((group) => !rated(group));
  if (!missing) return Object.fromEntries(groups().map((group) => [group.dataset.id, ratingOf(group)]));
  trouble("Criterion " + (groups().indexOf(missing) + 1) + " has no rating: choose one, or “can’t tell”.");
  missing.querySelector("input").focus();
  return undefined;
}

// ---- corrections ----

function edit(side, text) {  // opens the corrected text of an answer, or goes back to it
  const button = document.querySelector('[data-edit="' + side + '"]'), area = $(side + "-edit");
  if (!state || !state.item || !button || button.disabled || button.hidden) return;
  if (area.hidden) area.value = text || state.item[side];
  opened(side, true);
  if (!text) area.focus();
}

function opened(side, on) {
  const button = document.querySelector('[data-edit="' + side + '"]');
  if (!button) return;
  $(side).hidden = on;
  $(side + "-edit").hidden = !on;
  button.firstElementChild.textContent = on ? "Discard" : "Edit";
  button.setAttribute("aria-label", (on ? "Discard the correction of answer " : "Edit answer ") + SIDES[side]);
}

function corrected(choice) {  // of the chosen answer: its text, null, or undefined if that must be said first
  const sides = !state.item ? [] : Object.keys(SIDES).filter((side) => !$(side + "-edit").hidden && $(side + "-edit").value.trim() !== lines(state.item[side]).trim());
  const wrong = sides.find((side) => side !== choice);
  if (wrong) trouble("You corrected answer " + SIDES[wrong] + ": choose it, or discard the correction.");
  if (wrong) return undefined;
  const text = sides.length ? $(choice + "-edit").value.trim() : null;
  if (text === "") trouble("The corrected answer is empty: write it, or discard the correction.");
  return text === "" ? undefined : text;
}

// ---- drafts: what is written and not sent outlives an undo and a reload, with its item ----

const draftKey = ({ item, sha256 }) => ["draft", name, item, sha256].join("-");  // two items may have the same texts
const ticked = () => Array.from(document.querySelectorAll("#reasons input:checked"), (box) => box.value);

function keepDraft() {
  if (!state || !state.item) return;
  const edits = Object.fromEntries(Object.keys(SIDES).filter((side) => !$(side + "-edit").hidden).map((side) => [side, $(side + "-edit").value]));
  const ratings = Object.fromEntries(groups().filter(rated).map((group) => [group.dataset.id, rated(group).value]));
  tab(draftKey(state.item), JSON.stringify({ comment: $("comment").value, reasons: ticked(), ratings, edits, edit: null }));
}

// ---- the session ----

function begin() {
  trouble("");
  $("name").value = tab("name") || local("name") || "";
  if (tab("name")) enter(tab("name"), true);
  else view("start", TITLE);
}

async function enter(given, sure, typed) {
  given = given.trim().normalize("NFKC").toLowerCase();  // "Ann" beside "ann" is no second person
  const tried = typed || keyOf(given) || newId();
  const [status, data] = await call("/next", { annotator: given, key: tried });
  if (status !== 200 && $("start").hidden && $("work").hidden) view("start", TITLE);
  if (status === 400) return trouble("This pseudonym is not accepted: " + data.error + ".");
  if (status === 403) return renew(data.error);
  if (status === 409) return ask((typed ? "That is not the key. " : "") + data.error, given, true);
  if (status !== 200) return trouble(data.error, true);
  if (!sure && data.done)  // two people may share a browser
    return ask(given + " has " + count(data.votes, "vote") + ": continue as " + given + "?", given);
  name = given;
  key = tried;
  document.cookie = cookie(name) + "=" + encodeURIComponent(key) + "; max-age=34560000; SameSite=Strict";  // 400 days, the most that browsers grant
  $("own-key").hidden = true;
  tab("name", name);
  local("name", name);
  show(data, "");
  pending = JSON.parse(local("pending-" + name) || "null");  // a vote that a reload or a crash cut off
  if (pending) send();
}

function ask(question, instead, needsKey) {
  trouble("");
  $("known").hidden = false;
  $("known-words").textContent = question;
  $("key-field").hidden = !needsKey;
  $("key").value = "";
  $("continue").value = instead;
  $(needsKey ? "key" : "continue").focus();
}

function count(n, noun) {
  return n + " " + noun + (n === 1 ? "" : "s");
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
  const item = data.item && { ...data.item, ...JSON.parse(tab(draftKey(data.item)) || "null") };
  $("bar").max = data.all || 1;
  $("bar").value = data.done;
  $("everyone").textContent = name + " · " + count(data.everyone, "vote") + " in total";
  $("undo").disabled = !data.undoes;
  $("skip").hidden = !item;
  document.body.dataset.step = data.step;
  for (const box of document.querySelectorAll("#reasons input")) box.checked = Boolean(item && item.reasons.includes(box.value));
  $("comment").value = item ? item.comment : "";  // of a vote that was undone
  if (item) {
    for (const side in SIDES) opened(side, false);
    showItem(item);
    if (kind === "criteria") showCriteria(item);
    if (item.edit) edit(item.edit.left ? "left" : "right", item.edit.text);
    for (const [side, text] of Object.entries(item.edits || {})) edit(side, text);
    for (const id of ["prompt", "left", "right"]) $(id).scrollTop = 0;
    view("work", "Item " + (data.done + 1) + " of " + data.all);
    document.body.classList.remove("fresh");
    void document.body.offsetWidth;  // restarts the fade
    document.body.classList.add("fresh");
  } else {
    const judged = { pairs: "You compared " + count(data.votes, "pair"), criteria: "You rated " + count(data.votes, "answer") }[kind];
    $("numbers").textContent = judged + ". You skipped " + (data.done - data.votes) + ".";
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
  for (const field of document.querySelectorAll("#why input, textarea, [data-edit], #criteria input")) field.disabled = on;
  if (!on) for (const button of document.querySelectorAll(".chosen")) button.classList.remove("chosen");
}

function choose(choice, strength) {
  if (!state || !state.item) return;
  const button = document.querySelector('[data-choice="' + choice + '"]' + (choice === "skip" ? "" : '[data-strength="' + strength + '"]'));
  if (!button) return;  // with criteria there is neither side nor tie
  const { item, sha256 } = state.item;
  submit(button, choice === "skip"
    ? { event: "skip", item, sha256, choice: null, strength: null, undoes: null }
    : { event: "vote", item, sha256, choice, strength, undoes: null });
}

function undo() {
  keepDraft();
  if (state && state.undoes) submit($("undo"), { event: "undo", item: null, choice: null, strength: null, undoes: state.undoes });
}

function submit(button, body) {
  const now = performance.now();
  if (pending || now - shownAt < PAUSE) return;
  const comment = body.event === "undo" ? "" : $("comment").value.trim();
  const text = body.event === "undo" ? null : corrected(body.choice), given = body.choice === "rated" ? ratings() : null;
  if (given === undefined) return;
  if (text === undefined || tooLong("comment", comment) || tooLong("corrected answer", text || "")) return;
  const reasons = body.event === "undo" ? [] : ticked();
  pending = {
    ...body, event_id: newId(), annotator: name, key, session, step: state.step, reasons, comment, edit: text, ratings: given,
    ms_active: Math.round(active + (activeSince ? now - activeSince : 0)), ms_wall: Math.round(now - shownAt),
    ts_client: new Date().toISOString(), guidelines_sha256: document.body.dataset.guidelines,
  };
  local("pending-" + name, JSON.stringify(pending));
  lock(true);
  button.classList.add("chosen");
  send();
}

function tooLong(what, text) {  // said while it is written; a limit of the field would cut a pasted text in silence
  const over = Array.from(text).length - LONGEST[what];
  if (over > 0) trouble("The " + what + " is too long by " + count(over, "character") + ": at most " + LONGEST[what] + ", please.");
  return over > 0;
}

async function send() {
  if (sending || !pending) return;
  sending = true;
  clearTimeout(timer);
  const [status, data] = await call("/vote", pending);
  sending = false;
  if ([200, 400, 409, 413, 415].includes(status)) {
    const what = pending.event === "undo" ? "Undone." : "Saved.";
    if (status === 200 && pending.sha256) tab(draftKey(pending), null);
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
  return target.closest("textarea, input:not([type=checkbox]):not([type=radio]), select");
}

// The key's name. Where a digit needs Shift (AZERTY), and on a layout without Latin letters, it is
// that of its place on the keyboard. The keypad without NumLock has arrows, and no digits.
function pressed({ key, code }) {
  const place = code.match(/^Digit([123])$|^Key([A-Z])$/), letters = /^[^\P{L}\p{Script=Latin}]+$/u;
  if (place && (place[1] ? !/^\d$/.test(key) : letters.test(key))) return (place[1] || place[2]).toLowerCase();
  return key.length === 1 ? key.toLowerCase() : key;
}

document.addEventListener("keydown", (event) => {
  const { key, code, shiftKey } = event;
  if (key === "Escape" && event.target.closest("textarea")) return $("title").focus();
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  if (!$("shortcuts").checked || typing(event.target) || document.querySelector("dialog[open]")) return;
  if (key.startsWith("Arrow") && event.target.closest(".words") && event.target.type !== "radio") return;  // they scroll this text
  const forDigit = /^\d$/.test(key) && code.startsWith("Digit");  // Shift made the digit
  const strong = shiftKey && !forDigit && kind === "pairs" ? 3 : 2, what = pressed(event);
  const actions = {
    "1": () => choose("left", strong), ArrowLeft: () => choose("left", strong), q: () => choose("left", 1),
    "2": () => choose("right", strong), ArrowRight: () => choose("right", strong), w: () => choose("right", 1),
    "3": () => choose("tie", 0), t: () => choose("tie", 0), b: () => choose("both_bad", 0), s: () => choose("skip"),
    e: () => edit("left"), r: () => edit("right"), u: undo, c: () => $("work").hidden || $("comment").focus(), g: () => $("guidelines").showModal(), "?": () => $("help").showModal(),
  };
  if (kind === "criteria") {
    for (const old of ["q", "w", "b", "e", "r", "ArrowLeft", "ArrowRight"]) delete actions[old];
    Object.assign(actions, {
      "1": () => rate("yes"), y: () => rate("yes"), "2": () => rate("no"), n: () => rate("no"), "3": () => rate("none"), t: () => rate("none"),
      ArrowUp: () => move(-1), ArrowDown: () => move(1),
    });
    if (!event.target.closest("button, summary")) actions.Enter = () => choose("rated", 0);  // on a button Enter presses it
  }
  if (!Object.hasOwn(actions, what)) return;
  event.preventDefault();
  if (!event.repeat) actions[what]();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || event.detail > 1) return;
  if (button.dataset.choice) choose(button.dataset.choice, Number(button.dataset.strength));
  if (button.dataset.edit) $(button.dataset.edit).hidden ? opened(button.dataset.edit, false) : edit(button.dataset.edit);
  if (button.id === "undo") undo();
  if (button.id === "again") enter(name, true);
  if (button.id === "continue") enter(button.value, true, $("key").value.trim());
  if (button.id === "rename") { $("known").hidden = true; $("name").select(); }
  if (button.id === "show-guidelines") $("guidelines").showModal();
  if (button.id === "show-help") $("help").showModal();
  if (button.id === "show-key") { $("own-key").textContent = key; $("own-key").hidden = false; }
  if (button.id === "retry") pending ? send() : begin();
});

$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  $("known").hidden = true;
  enter($("name").value, false);
});
$("key").addEventListener("keydown", (event) => {  // Enter would start under the name above
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("continue").click();
});
$("comment").addEventListener("input", () => tooLong("comment", $("comment").value) || pending || trouble(""));
for (const side in SIDES) $(side + "-edit").addEventListener("input", () => tooLong("corrected answer", $(side + "-edit").value) || pending || trouble(""));
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
window.addEventListener("pagehide", keepDraft);
begin();
