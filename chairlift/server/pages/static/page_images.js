"use strict";
// Images for the next message, pasted or dropped. The page shows them above the text until they are sent.

const MOST_BYTES = 32 * 2 ** 20;  // maximum size of an image file, as in the server
let pictures = [];  // data URLs

function content(text) {  // content of a message, with the images to send
  if (!pictures.length) return text;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function textOf(given) {  // text of a content, which may be a list of parts
  return Array.isArray(given) ? given.filter(({ type }) => type === "text").map(({ text }) => text).join("\n") : given;
}

function imagesOf(given) {
  return Array.isArray(given) ? given.filter(({ type }) => type === "image_url").map(({ image_url }) => image_url.url) : [];
}

function picture(url) {
  const image = make("img");
  image.src = url;
  image.alt = "image";
  return image;
}

function offerPictures() {
  $("pictures").replaceChildren(...pictures.map((url, at) => {
    const drop = button("Remove", () => {
      pictures.splice(at, 1);
      offerPictures();
    });
    const box = make("figure");
    box.append(picture(url), drop);
    return box;
  }));
  $("pictures").hidden = !pictures.length;
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function takeImages(files) {  // returns an error text, or an empty text if all files can be sent
  const problems = [];
  for (const file of files) {
    if (!file.type.startsWith("image/")) problems.push(`${file.name} is no image.`);
    else if (file.size > MOST_BYTES) problems.push(`${file.name} is larger than ${MOST_BYTES / 2 ** 20} MiB.`);
    else {
      try {
        pictures.push(await readFile(file));
      } catch {
        problems.push(`${file.name} cannot be read.`);
      }
    }
  }
  offerPictures();
  return problems.join(" ");
}
