"use strict";
// Display of Markdown, JSON trees and copy buttons. Only `rendered` turns a model's or client's text into markup:
// markdown-it treats HTML as text, and DOMPurify creates the nodes and removes everything that is not listed.

const $ = (id) => document.getElementById(id);

function make(tag, text = "", kind = "") {
  const node = document.createElement(tag);
  node.textContent = text;  // everything that is not Markdown goes through here, so it cannot be markup
  node.className = kind;
  return node;
}

function button(text, press, kind = "small") {
  const node = make("button", text, kind);
  node.type = "button";
  node.addEventListener("click", press);
  return node;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that did not come by HTTPS or from this machine has no clipboard
    const field = make("textarea", "", "aside");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) throw new Error("the browser does not let this page copy");
  }
}

function copier(text, name = "Copy") {
  const node = button(name, async () => {
    node.textContent = await copy(text()).then(() => "Copied", () => "Not copied");
    setTimeout(() => { node.textContent = name; }, 1500);
  });
  return node;
}

// Markdown

const markdown = markdownit({ html: false, linkify: true, breaks: true }).disable("image");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
for (const cell of ["th_open", "td_open"]) {  // the policy allows no style attributes
  markdown.renderer.rules[cell] = (tokens, at, options, env, renderer) => {
    const side = tokens[at].attrGet("style")?.match(/left|right|center/);
    if (side) tokens[at].attrs = [["align", side[0]]];
    return renderer.renderToken(tokens, at, options);
  };
}
const BLOCKS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "pre"];
const WORDS = ["strong", "em", "s", "code", "a", "table", "thead", "tbody", "tr", "th", "td"];
const ALLOWED = {
  ALLOWED_TAGS: [...BLOCKS, ...WORDS],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LANGUAGE = /^language-([\w+#.-]{1,30})$/;
DOMPurify.addHook("uponSanitizeAttribute", (node, given) => {
  if (given.attrName === "class") given.keepAttr = node.tagName === "CODE" && LANGUAGE.test(given.attrValue);
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
});

function codeBox(pre, language = "") {
  const box = make("div", "", "code"), head = make("div", "", "codehead");
  head.append(make("span", language), copier(() => pre.textContent));
  pre.tabIndex = 0;  // so that the keys scroll it
  box.append(head, pre);
  return box;
}

function rendered(text) {
  const nodes = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const pre of [...nodes.querySelectorAll("pre")]) {
    const language = pre.firstElementChild?.className.match(LANGUAGE)?.[1];
    const place = document.createComment("");
    pre.replaceWith(place);
    place.replaceWith(codeBox(pre, language));
  }
  for (const table of [...nodes.querySelectorAll("table")]) {
    const box = make("div", "", "scroll");
    table.replaceWith(box);
    box.append(table);
  }
  return nodes;
}

const LOOKS_LIKE_JSON = /^\s*(\{\s*"|\{\s*\}|\[\s*[[{"\d\]-])/;
const MOST_MARKDOWN = 400000;  // characters; what is longer is shown as it is

// A growing text. Blocks before the last one are not drawn again. After each drawing the page waits four times as long as
// the drawing took, so that a long answer never keeps the browser busy.
class Prose {
  constructor(box, drawn = () => {}) {
    Object.assign(this, { box, drawn, text: "", rest: "", tail: [], cost: 0, timer: 0, plain: null });
  }

  add(piece) {
    this.text += piece;
    this.rest += piece;
    this.timer ||= setTimeout(() => this.draw(), Math.max(16, 4 * this.cost));
  }

  draw() {
    const begun = performance.now();
    this.timer = 0;
    if (LOOKS_LIKE_JSON.test(this.text) || this.text.length > MOST_MARKDOWN) this.asItIs();
    else this.grow();
    this.drawn();
    this.cost = performance.now() - begun;
  }

  asItIs() {
    if (!this.plain) {
      this.plain = make("pre", "", "plain");
      this.box.replaceChildren(this.plain);
      this.rest = this.text;
    }
    this.plain.append(this.rest);
    this.rest = "";
  }

  grow() {
    this.rest = this.rest.replace(/\r\n?/g, "\n");
    const begins = markdown.parse(this.rest, {}).filter((each) => each.level === 0 && each.map).map((each) => each.map[0]);
    const line = Math.max(0, ...begins);
    for (const node of this.tail) node.remove();
    if (line > 0) {
      const lines = this.rest.split("\n");
      this.box.append(rendered(lines.slice(0, line).join("\n")));
      this.rest = lines.slice(line).join("\n");
    }
    const nodes = rendered(this.rest);
    this.tail = [...nodes.childNodes];
    this.box.append(nodes);
  }

  end() {  // once more, and as a whole: a link may be defined at the end
    clearTimeout(this.timer);
    this.timer = 0;
    const value = LOOKS_LIKE_JSON.test(this.text) ? parsed(this.text) : undefined;
    const long = this.text.length > MOST_MARKDOWN;
    if (value !== undefined) this.box.replaceChildren(twoWays(value, this.text));
    else this.box.replaceChildren(long ? make("pre", this.text, "plain") : rendered(this.text));
    if (!this.box.textContent.trim()) this.box.replaceChildren(make("pre", this.text, "plain"));  // nothing but marks
    this.drawn();
  }
}

// Trees of JSON

class Digits {  // a number as it was written, where JavaScript would show another one
  constructor(text) { this.text = text; }
}

function parsed(text) {  // an object or a list, or undefined where it is none
  try {
    const exact = (key, value, { source } = {}) =>
      typeof value === "number" && source && String(value) !== source ? new Digits(source) : value;
    const value = JSON.parse(text, exact);
    return value && typeof value === "object" && !(value instanceof Digits) ? value : undefined;
  } catch {
    return undefined;
  }
}

const MOST_CHILDREN = 100;

function tree(value, name, depth = 0) {
  const key = name === undefined ? "" : `${name}: `;
  if (value instanceof Digits || value === null || typeof value !== "object") {
    const line = make("div", "", "leaf"), kind = value === null ? "null" : typeof value;
    line.append(make("span", key, "key"), make("span", value?.text ?? JSON.stringify(value), `is-${kind}`));
    return line;
  }
  const list = Array.isArray(value), entries = Object.entries(value);
  const box = make("details", "", "tree"), title = make("summary");
  title.append(make("span", key, "key"), make("span", list ? `[${entries.length}]` : `{${entries.length}}`, "size"));
  box.append(title);
  let shown = 0;
  const more = () => {
    const next = entries.slice(shown, shown + MOST_CHILDREN).map(([key, each]) => tree(each, key, depth + 1));
    shown += next.length;
    box.append(...next);
    if (shown === entries.length) return;
    const rest = button(`${entries.length - shown} more`, () => { rest.remove(); more(); });
    box.append(rest);
  };
  if (depth < 2 && entries.length <= 30 || depth === 0) {
    box.open = true;
    more();
  } else {
    box.addEventListener("toggle", more, { once: true });
  }
  return box;
}

function twoWays(value, text) {  // as a tree, and as it was written
  const box = make("div", "", "json"), written = make("pre", text, "plain"), grown = tree(value);
  written.hidden = true;
  const turn = button("Text", () => {
    written.hidden = !written.hidden;
    grown.hidden = !written.hidden;
    turn.textContent = written.hidden ? "Text" : "Tree";
  });
  box.append(turn, grown, written);
  return box;
}
