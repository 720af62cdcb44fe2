// For each element with text of its own: the contrast of the text with what is behind it, and the
// text. See WCAG 2, "relative luminance".
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    if (element === null) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  return [...document.querySelectorAll("body *")]
    .filter((element) => {
      const hasText = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
      return hasText && element.checkVisibility() && !element.closest("script, .hidden, option");
    })
    .map((element) => {
      const back = behind(element);
      const text = over(rgba(getComputedStyle(element).color), back);
      const [low, high] = [luminance(text), luminance(back)].sort((a, b) => a - b);
      return [(high + 0.05) / (low + 0.05), element.textContent.slice(0, 40)];
    });
})()
