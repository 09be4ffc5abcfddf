/* Follow a link into closed details: open them first. */
(() => {
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let around = target; around; around = around.parentElement) {
      if (around instanceof HTMLDetailsElement) around.open = true;
    }
    target?.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();
})();
