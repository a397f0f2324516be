//! A flame graph as SVG, without scripts: frames of a stack above each other, as wide as their share of the
//! samples.

use std::fmt::Write as _;

use crate::stacks::Folded;

const WIDTH: f64 = 1200.0;
const ROW: f64 = 17.0;
const MARGIN: f64 = 10.0;
/// Height of the lines above the frames.
const HEAD: f64 = 40.0;
/// Width of a character of the font.
const CHARACTER: f64 = 6.6;
/// Narrowest frame that is drawn.
const LEAST_WIDTH: f64 = 0.3;

/// A function within its callers.
#[derive(Debug, Default, PartialEq)]
struct Frame {
    name: String,
    samples: i64,
    callees: Vec<Frame>,
}

impl Frame {
    fn add(&mut self, stack: &[String], samples: i64) {
        self.samples = self.samples.saturating_add(samples);
        let Some((name, rest)) = stack.split_first() else { return };
        // Stacks are sorted, so that a callee which exists is the last one.
        if self.callees.last().is_none_or(|last| last.name != *name) {
            self.callees.push(Self { name: name.clone(), ..Self::default() });
        }
        if let Some(callee) = self.callees.last_mut() {
            callee.add(rest, samples);
        }
    }

    fn depth(&self, scale: f64) -> u32 {
        let drawn = self.callees.iter().filter(|callee| callee.width(scale) >= LEAST_WIDTH);
        drawn.map(|callee| callee.depth(scale)).max().unwrap_or(0).saturating_add(1)
    }

    #[expect(clippy::cast_precision_loss, reason = "a number of samples")]
    fn width(&self, scale: f64) -> f64 {
        self.samples as f64 * scale
    }
}

/// Draws the samples below a title.
#[expect(clippy::cast_precision_loss, reason = "a number of samples")]
#[must_use]
pub fn svg(title: &str, folded: &Folded) -> String {
    let mut root = Frame { name: "all".to_owned(), ..Frame::default() };
    for (stack, samples) in folded {
        root.add(stack, *samples);
    }
    let scale = (WIDTH - 2.0 * MARGIN) / (root.samples.max(1) as f64);
    let height = HEAD + f64::from(root.depth(scale)) * ROW + MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"monospace\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fffdf5\"/>\n\
         <text x=\"{MARGIN}\" y=\"22\" font-size=\"15\">{}</text>\n",
        escape(title)
    );
    if root.samples == 0 {
        let _ =
            writeln!(out, "<text x=\"{MARGIN}\" y=\"{HEAD}\">No samples: the service used no CPU.</text>");
    } else {
        draw(&root, MARGIN, height - MARGIN - ROW, scale, root.samples, &mut out);
    }
    out.push_str("</svg>\n");
    out
}

fn draw(frame: &Frame, x: f64, y: f64, scale: f64, all: i64, out: &mut String) {
    let width = frame.width(scale);
    if width < LEAST_WIDTH {
        return;
    }
    let tenths = frame.samples.saturating_mul(1000).checked_div(all).unwrap_or_default();
    let name = escape(&frame.name);
    let _ = writeln!(
        out,
        "<g><title>{name} ({} samples, {}.{} %)</title><rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{:.0}\" \
         fill=\"{}\"/>{}</g>",
        frame.samples,
        tenths / 10,
        tenths % 10,
        ROW - 1.0,
        color(&frame.name),
        label(&frame.name, x, y, width)
    );
    let mut x = x;
    for callee in &frame.callees {
        draw(callee, x, y - ROW, scale, all, out);
        x += callee.width(scale);
    }
}

/// Returns as much of a name as fits into a frame, from its end: the path of a function ends in its name.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small number of characters")]
fn label(name: &str, x: f64, y: f64, width: f64) -> String {
    let room = ((width - 6.0) / CHARACTER).max(0.0) as usize;
    let length = name.chars().count();
    if room < 3 {
        return String::new();
    }
    let text = match length.checked_sub(room) {
        None | Some(0) => name.to_owned(),
        Some(over) => format!("…{}", name.chars().skip(over.saturating_add(1)).collect::<String>()),
    };
    format!("<text x=\"{:.1}\" y=\"{:.0}\">{}</text>", x + 3.0, y + ROW - 5.0, escape(&text))
}

/// Returns a warm colour that is the same for each frame of a function.
fn color(name: &str) -> String {
    let hash =
        name.bytes().fold(2_166_136_261_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    let part = |shift: u32, least: u32, range: u32| {
        let bits = hash.checked_shr(shift).unwrap_or_default();
        bits.checked_rem(range).unwrap_or_default().saturating_add(least)
    };
    format!("hsl({},{}%,{}%)", part(0, 12, 40), part(8, 70, 20), part(16, 62, 12))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(lines: &[(&str, i64)]) -> Folded {
        lines.iter().map(|(stack, n)| (stack.split(';').map(str::to_owned).collect(), *n)).collect()
    }

    #[test]
    fn a_frame_is_as_wide_as_its_samples_and_above_its_caller() {
        let drawn = svg("pod-sync: 1 ms", &folded(&[("main;run;a<u8>", 3), ("main;run", 1)]));
        let frames: Vec<&str> = drawn.lines().filter(|line| line.starts_with("<g>")).collect();
        assert_eq!(frames.len(), 4, "{drawn}");
        for (frame, name, samples, width) in [
            (frames[0], "all", "4 samples, 100.0 %", "1180.0"),
            (frames[1], "main", "4 samples, 100.0 %", "1180.0"),
            (frames[2], "run", "4 samples, 100.0 %", "1180.0"),
            (frames[3], "a&lt;u8&gt;", "3 samples, 75.0 %", "885.0"),
        ] {
            assert!(frame.contains(&format!("<title>{name} ({samples})")), "{frame}");
            assert!(frame.contains(&format!("width=\"{width}\"")), "{frame}");
        }
        let height = |frame: &str| {
            let (_, rest) = frame.split_once(" y=\"").unwrap();
            rest.split_once('"').unwrap().0.parse::<i64>().unwrap()
        };
        assert!(frames.windows(2).all(|pair| height(pair[0]) - height(pair[1]) == 17), "{drawn}");
        assert!(drawn.contains("pod-sync: 1 ms") && drawn.ends_with("</svg>\n"));
    }

    #[test]
    fn a_long_name_keeps_its_end_and_a_narrow_frame_has_no_text() {
        assert!(label("crate::module::function", 0.0, 0.0, 80.0).contains(">…::function<"));
        assert_eq!(label("function", 0.0, 0.0, 10.0), "");
    }

    #[test]
    fn a_profile_without_samples_says_so() {
        assert!(svg("t", &Folded::new()).contains("No samples"));
    }
}
