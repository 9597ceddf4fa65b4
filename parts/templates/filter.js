
// the filter above the answers of a run; without this script all of them are visible
const cards = [...document.querySelectorAll("article")];
if (cards.length) {
  const bar = document.createElement("form");
  bar.className = "filter";
  bar.setAttribute("role", "search");
  const field = (name, control) => {
    const label = document.createElement("label");
    label.append(name + " ", control);
    bar.append(label);
    return control;
  };
  const choice = (name, values) => {
    const select = document.createElement("select");
    select.append(...["all", ...values].map(value => new Option(value, value)));
    return field(name, select);
  };
  const kinds = cards.map(card => card.dataset.kinds.split(" "));
  const steps = new Set(kinds.flat().filter(k => k.startsWith("step-")).map(k => k.slice(5)));
  const text = field("Text", Object.assign(document.createElement("input"), { type: "search" }));
  const step = choice("Step", [...steps]);
  const kind = choice("Kind", ["best", "worst", "flagged"].filter(k => kinds.flat().includes(k)));
  const count = bar.appendChild(document.createElement("output"));
  const show = () => {
    const wanted = text.value.toLowerCase();
    let shown = 0;
    cards.forEach((card, i) => {
      card.hidden = !(
        card.textContent.toLowerCase().includes(wanted) &&
        (step.value === "all" || kinds[i].includes("step-" + step.value)) &&
        (kind.value === "all" || kinds[i].includes(kind.value)));
      shown += !card.hidden;
    });
    count.textContent = `${shown} of ${cards.length} shown`;
  };
  bar.addEventListener("input", show);
  bar.addEventListener("submit", event => event.preventDefault());
  cards[0].before(bar);
  show();
}
