"use strict";
// Markdown becomes elements, never HTML. It formats and takes nothing away: every mark stays in its
// place in a softer colour, so the text of a rendering is its source, blanks aside. What is not
// known here (links, HTML, LaTeX) stays as it is. All steps are linear; nesting ends at DEEPEST.
const DEEPEST = 8;

// Characters that hide, or turn the direction of a text, are shown by their number, but not those
// inside the flags of England, Scotland and Wales.
const HIDDEN = /(\u{1f3f4}\u{e0067}\u{e0062}(?:\u{e0065}\u{e006e}\u{e0067}|\u{e0073}\u{e0063}\u{e0074}|\u{e0077}\u{e006c}\u{e0073})\u{e007f}|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}])/u;
const LISTED = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})/;  // ```{"fit": true}``` is code inside a line
const BLOCKS = { fence: FENCE, heading: /^ {0,3}#{1,6}\s+\S/, list: LISTED, quote: /^\s{0,3}>/ };

function element(kind, text, classes) {
  const made = document.createElement(kind);
  made.textContent = text || "";
  made.className = classes || "";
  return made;
}

function words(parent, text) {
  text.split(HIDDEN).forEach((part, i) => {
    if (i % 2 && part.length < 3) part = element("span", "U+" + part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"), "control");
    if (part) parent.append(part);
  });
  return parent;
}

function mark(parent, text) {
  parent.append(words(element("span", "", "mark"), text));
  return parent;
}

// ---- inside a block: `code`, *slanted*, **bold** ----

function pairs(parts) {  // of the runs of ` and * at odd places: index of the run that closes or opens it
  const partner = Array(parts.length).fill(-1), next = partner.slice(), latest = {}, open = [];
  for (let i = parts.length - 2; i > 0; i -= 2) {
    next[i] = latest[parts[i]] ?? -1;
    latest[parts[i]] = i;
  }
  const join = (i, j) => { partner[i] = j; partner[j] = i; };
  for (let i = 1; i < parts.length; i += 2) {
    const run = parts[i], before = (parts[i - 1] || parts[i - 2] || " ").slice(-1), after = (parts[i + 1] || parts[i + 2] || " ")[0];
    if (before === "\\") continue;
    if (run[0] === "`") {
      if (next[i] > 0) { join(i, next[i]); i = next[i]; }
      continue;
    }
    const inWord = (c) => run.length === 1 && /\w/.test(c);  // 2*3*4 is arithmetic
    const k = /\s/.test(before) || inWord(after) ? -1 : open.findLastIndex((j) => parts[j] === run);
    if (k >= 0) {
      join(open[k], i);
      open.length = k;
    } else if (run.length < 4 && !/\s/.test(after) && !inWord(before)) {
      if (open.push(i) > DEEPEST) open.shift();
    }
  }
  return partner;
}

function inline(parent, text) {
  const parts = text.split(/(`+|\*+)/), partner = pairs(parts), outer = [];
  let at = parent;
  for (let i = 0; i < parts.length; i++) {
    const run = parts[i], j = partner[i];
    if (j < 0) {
      words(at, run);
    } else if (j < i) {
      mark(at, run);
      at = outer.pop();
    } else if (run[0] === "`") {
      const code = mark(element("code"), run);
      at.append(mark(words(code, parts.slice(i + 1, j).join("")), parts[j]));
      i = j;
    } else {
      outer.push(at);
      at.append(at = mark(element(run.length === 1 ? "em" : "strong"), run));
    }
  }
  return parent;
}

// ---- blocks ----

function cells(line) {
  return line.trim().split(/(?<!\\)\|/);
}

function isRule(line) {  // |---|:-:|, below the head of a table
  return /\|/.test(line || "") && cells(line).every((cell, i, all) => /^:?-+:?$/.test(cell.trim()) || (!cell.trim() && (!i || i === all.length - 1)));
}

function kindOf(lines, at) {
  if (!lines[at].trim()) return "blank";
  const kind = Object.keys(BLOCKS).find((name) => BLOCKS[name].test(lines[at]));
  return kind || (lines[at].includes("|") && isRule(lines[at + 1]) ? "table" : "text");
}

function block(target, kind) {
  return target.appendChild(element(kind));
}

function tableRow(part, line, kind, classes) {
  const row = element("tr", "", classes), pieces = cells(line);
  pieces.forEach((piece, i) => {
    if (!piece.trim() && !i && pieces.length > 1) return;  // the line begins with |
    if (!piece.trim() && i === pieces.length - 1 && row.lastChild) return mark(row.lastChild, "|");
    const cell = block(row, kind);
    if (i) mark(cell, "|");
    inline(cell, piece.trim());
  });
  part.append(row);
}

function indent(line) {
  return line.match(/^\s*/)[0].replaceAll("\t", "    ").length;
}

function listEnd(lines, at) {  // of the item that begins at this line
  const least = indent(lines[at]);
  let end = at + 1;
  for (let i = end; i < lines.length; i++) {
    const kind = kindOf(lines, i);
    if (kind === "blank") continue;
    if (indent(lines[i]) <= least && (kind !== "text" || i > end)) break;
    end = i + 1;
  }
  return end;
}

const SHOW = {  // each shows the lines from `at` on that belong to it, and returns where they end
  blank: (target, lines, at) => at + 1,
  fence(target, lines, at) {
    const run = lines[at].match(FENCE)[1], closes = (line) => line.trim().length >= run.length && line.trim() === run[0].repeat(line.trim().length);
    let end = at + 1;
    while (end < lines.length && !closes(lines[end])) end++;
    const made = mark(block(target, "pre"), lines[at].trimStart() + "\n");
    made.append(words(element("code"), lines.slice(at + 1, end).join("\n") + "\n"));
    if (end < lines.length) mark(made, lines[end]);
    return end + 1;
  },
  heading(target, lines, at) {
    const hashes = lines[at].match(/^\s*#+\s+/)[0];
    inline(mark(block(target, "h3"), hashes), lines[at].slice(hashes.length));
    return at + 1;
  },
  list(target, lines, at, depth) {
    const kind = (line) => /\d/.test(line.match(LISTED)[2]) ? "ol" : "ul", first = kind(lines[at]);
    const list = element(first);
    target.append(list);
    while (at < lines.length && kindOf(lines, at) === "list" && kind(lines[at]) === first) {
      const [start, blanks, bullet] = lines[at].match(LISTED), end = listEnd(lines, at);
      const inner = [lines[at].slice(start.length), ...lines.slice(at + 1, end).map((line) => line.slice(Math.min(line.length - line.trimStart().length, start.length)))];
      const item = mark(block(list, "li"), bullet);
      const content = element("div");
      item.append(content);
      blocks(content, inner, depth + 1);
      for (at = end; at < lines.length && !lines[at].trim();) at++;
    }
    return at;
  },
  quote(target, lines, at) {
    const made = block(target, "blockquote");
    for (; at < lines.length && kindOf(lines, at) === "quote"; at++) {
      if (made.hasChildNodes()) made.append("\n");
      inline(mark(made, ">"), lines[at].replace(">", "").trimEnd());
    }
    return at;
  },
  table(target, lines, at) {
    const frame = element("div", "", "wide"), made = element("table"), head = element("thead"), body = element("tbody");
    Object.assign(frame, { tabIndex: 0, role: "group", ariaLabel: "Table" });
    tableRow(head, lines[at], "th");
    tableRow(head, lines[at + 1], "td", "rule");
    for (at += 2; at < lines.length && lines[at].includes("|") && /text|table/.test(kindOf(lines, at)); at++) tableRow(body, lines[at], "td");
    made.append(head, body);
    frame.append(made);
    target.append(frame);
    return at;
  },
  text(target, lines, at) {
    const start = at++;
    while (at < lines.length && kindOf(lines, at) === "text") at++;
    inline(block(target, "p"), lines.slice(start, at).join("\n"));
    return at;
  },
};

function blocks(target, lines, depth) {
  for (let at = 0; at < lines.length;) {
    const kind = kindOf(lines, at);
    at = SHOW[kind === "list" && depth >= DEEPEST ? "text" : kind](target, lines, at, depth);
  }
}

function render(target, text, formatted) {
  target.replaceChildren();
  if (formatted) blocks(target, text.split(/\r\n|\r|\n/), 0);
  else words(block(target, "p"), text);
  // each block has the direction of its own text, a list item's paragraphs that of the item; set at
  // the end, because a browser finds it again at every change
  for (const made of target.querySelectorAll(":is(p, pre, h3, blockquote, li, th, td):not(li p)")) made.dir = "auto";
}
