"use strict";
// The model, example questions of an empty chat, and the limits of length.

const EXAMPLES = {
  bundled: ["What is continuous batching?", "What is wrong with static batching?", "What is the KV cache?", "What is preemption?"],
  other: [
    "Explain in three sentences how a language model writes text.",
    "Write a Python function that merges two sorted lists.",
    "Compare bread and rice in a table.",
    "Give three names for a cat, as JSON.",
  ],
};

function offerExamples() {  // one click asks; the demo model knows only its own subject
  $("examples").replaceChildren(...(model ? EXAMPLES[model] ?? EXAMPLES.other : []).map((question) => button(question, () => {
    if (stopping) return;
    $("text").value = question;
    $("say").requestSubmit();
  }, "example")));
}

function showModel(served) {  // of several models and adapters, the reader chooses one
  const names = served.map(({ id }) => id), choice = $("models");
  const chosen = served[Math.max(0, names.indexOf(sessionStorage.getItem("model")))];
  if ([...choice.options].map((option) => option.value).join() !== names.join()) {
    choice.replaceChildren(...names.map((name) => make("option", name)));
  }
  choice.hidden = names.length < 2;
  choice.value = choice.title = chosen.id;
  room = chosen.max_model_len ?? Infinity;  // unknown until the model is loaded
  if (model !== chosen.id) {
    model = chosen.id;
    offerExamples();
  }
  $("tokens").placeholder = longest();
  showLimit();
  $("sees").hidden = !chosen.takes_images;
}

$("models").addEventListener("change", () => {
  sessionStorage.setItem("model", $("models").value);
  room = Infinity;
  look();
});

function longest() { return Math.min(512, Math.floor(room / 4)); }

function most() { return $("tokens").valueAsNumber || longest(); }

function number(value) { return value.toLocaleString("en"); }

function showLimit() {  // how long an answer may be, and how much of the model's length the conversation has
  $("limit").hidden = room === Infinity;
  if (room === Infinity) return;
  const { prompt_tokens: read = 0, completion_tokens: written = 0 } = entries.findLast((entry) => entry.usage)?.usage ?? {};
  const used = entries.length ? `${number(read + written)} of ${number(room)} tokens used` : `${number(room)} tokens in all`;
  $("limit").textContent = `at most ${number(most())} tokens per answer · ${used}`;
}

function markDropped() {  // what is above the mark no longer fits, and is not sent
  document.querySelector(".dropped")?.remove();
  const first = from > 0 ? $("chat").children[1 + from] : null;
  first?.before(make("p", `The messages above are no longer sent: the model takes ${number(room)} tokens.`, "hint dropped"));
}

$("tokens").addEventListener("input", showLimit);

// The settings

function closeSettings() {
  $("settings").open = false;
  $("settings").firstElementChild.focus();
}

$("close").addEventListener("click", closeSettings);
$("settings").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !$("settings").open) return;
  event.stopPropagation();  // it does not stop an answer
  closeSettings();
});
