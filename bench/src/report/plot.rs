//! Draws plots as SVG without a library, so that a page needs no script.

use std::fmt::Write as _;

pub(super) const WIDTH: f64 = 560.0;
pub(super) const HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// A plot: a pair of axes with curves.
#[derive(Clone, Debug)]
pub struct Plot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub curves: Vec<Curve>,
    /// Vertical lines, at these values of x, each with a label.
    pub marks: Vec<(f64, String)>,
    /// A range of x that is shaded, behind everything else.
    pub shaded: Option<(f64, f64)>,
}

#[derive(Clone, Debug)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
    /// Values that are always visible, whatever the data.
    pub includes: Vec<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Log,
}

#[derive(Clone, Debug)]
pub struct Curve {
    pub name: String,
    /// The number of the colour in the page's style sheet.
    pub colour: usize,
    pub points: Vec<(f64, f64)>,
    pub style: Style,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Line,
    Dashed,
    /// Points joined by a line; each shows its value on hover.
    Dots,
}

/// The scale of an axis with fixed ends, which maps values to pixels.
struct Ruler {
    scale: Scale,
    low: f64,
    high: f64,
    from_px: f64,
    to_px: f64,
}

impl Axis {
    pub fn new(label: &str, scale: Scale) -> Self {
        Self { label: label.to_owned(), scale, includes: Vec::new() }
    }

    pub fn including(mut self, values: &[f64]) -> Self {
        self.includes.extend_from_slice(values);
        self
    }

    fn ruler(&self, values: impl Iterator<Item = f64>, from_px: f64, to_px: f64) -> Ruler {
        let shown = |value: &f64| value.is_finite() && (self.scale == Scale::Linear || *value > 0.0);
        let all = values.chain(self.includes.iter().copied()).filter(shown);
        let (low, high) =
            all.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.1, 1.0) } else { (low, high) };
        let (low, high) = match self.scale {
            Scale::Linear if low == high => (low - 0.5, high + 0.5),
            Scale::Linear => (low, high + (high - low) * 0.04),
            Scale::Log => (low * 0.8, high * 1.25),
        };
        Ruler { scale: self.scale, low, high, from_px, to_px }
    }
}

impl Plot {
    /// Returns the plot as a part of an HTML page, with its name and legend.
    pub fn to_svg(&self) -> String {
        let mut svg = format!(
            "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">",
            escape(&self.title)
        );
        self.draw(&mut svg);
        svg.push_str("</svg>");
        self.legend(&mut svg);
        svg.push_str("</figure>\n");
        svg
    }

    /// Draws the axes and curves, without name and legend.
    pub(super) fn draw(&self, svg: &mut String) {
        let points = || self.curves.iter().flat_map(|curve| curve.points.iter());
        let x = self.x.ruler(points().map(|(x, _)| *x), LEFT, WIDTH - RIGHT);
        let y = self.y.ruler(points().map(|(_, y)| *y), HEIGHT - BOTTOM, TOP);
        self.shade(svg, &x);
        self.grid(svg, &x, &y);
        self.curves.iter().for_each(|curve| curve.draw(svg, &x, &y));
        self.mark(svg, &x);
    }

    fn shade(&self, svg: &mut String, x: &Ruler) {
        if let Some((from, to)) = self.shaded {
            let (left, right) = (x.px(from).max(LEFT), x.px(to).min(WIDTH - RIGHT));
            let (width, height) = ((right - left).max(0.0), HEIGHT - BOTTOM - TOP);
            let _ = write!(
                svg,
                "<rect class=\"shade\" x=\"{left:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\"/>"
            );
        }
    }

    fn grid(&self, svg: &mut String, x: &Ruler, y: &Ruler) {
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for tick in x.ticks() {
            let (at, text) = (x.px(tick), show(tick));
            let _ = write!(svg, "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>");
            let _ = write!(
                svg,
                "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                bottom + 15.0
            );
        }
        for tick in y.ticks() {
            let (at, text) = (y.px(tick), show(tick));
            let _ = write!(svg, "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/>");
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
        let middle = (LEFT + right) / 2.0;
        let label = escape(&self.x.label);
        let _ =
            write!(svg, "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", HEIGHT - 8.0);
        let (middle, label) = ((TOP + bottom) / 2.0, escape(&self.y.label));
        let _ = write!(
            svg,
            "<text transform=\"translate(13 {middle}) rotate(-90)\" text-anchor=\"middle\">{label}</text>"
        );
    }

    fn mark(&self, svg: &mut String, x: &Ruler) {
        for (nth, (at, word)) in self.marks.iter().enumerate() {
            let px = x.px(*at);
            let y = TOP + 12.0 + (nth % 4) as f64 * 13.0;
            let _ = write!(svg, "<path class=\"mark\" d=\"M{px:.1} {TOP}V{}\"/>", HEIGHT - BOTTOM);
            let _ =
                write!(svg, "<text class=\"mark\" x=\"{:.1}\" y=\"{y}\">{}</text>", px + 3.0, escape(word));
        }
    }

    fn legend(&self, svg: &mut String) {
        let named: Vec<_> = self.curves.iter().filter(|curve| !curve.name.is_empty()).collect();
        if named.len() > 1 {
            svg.push_str("<ul class=\"legend\">");
            for curve in named {
                let dashed = if curve.style == Style::Dashed { " dashed" } else { "" };
                let (colour, name) = (curve.colour % N_COLOURS, escape(&curve.name));
                let _ = write!(svg, "<li><span class=\"key k{colour}{dashed}\"></span>{name}</li>");
            }
            svg.push_str("</ul>");
        }
    }
}

/// The number of colours in the page's style sheet.
pub const N_COLOURS: usize = 6;

impl Curve {
    fn draw(&self, svg: &mut String, x: &Ruler, y: &Ruler) {
        let shown: Vec<_> = self.points.iter().filter(|(px, py)| x.shows(*px) && y.shows(*py)).collect();
        let mut path = String::new();
        for (nth, (px, py)) in shown.iter().enumerate() {
            let _ = write!(path, "{}{:.1} {:.1}", if nth == 0 { "M" } else { "L" }, x.px(*px), y.px(*py));
        }
        let (colour, dashed) =
            (self.colour % N_COLOURS, if self.style == Style::Dashed { " dashed" } else { "" });
        let _ = write!(svg, "<path class=\"curve c{colour}{dashed}\" d=\"{path}\"/>");
        if self.style == Style::Dots {
            for (px, py) in shown {
                let tip = format!("{}: {} / {}", escape(&self.name), show(*px), show(*py));
                let (cx, cy) = (x.px(*px), y.px(*py));
                let _ = write!(
                    svg,
                    "<circle class=\"d{colour}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"4\"><title>{tip}</title></circle>"
                );
            }
        }
    }
}

impl Ruler {
    fn shows(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    fn px(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from_px + share * (self.to_px - self.from_px)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => linear_ticks(self.low, self.high),
            Scale::Log => log_ticks(self.low, self.high),
        }
    }
}

/// Returns about six ticks: multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= high).take(20).collect()
}

/// Returns ticks for a log scale: 1, 2 and 5 of each decade; only the powers of ten for many decades; even
/// steps if fewer than two ticks fit.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let digits: &[f64] = if (high / low).log10() > 3.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all = decades.flat_map(|decade| digits.iter().map(move |digit| digit * 10f64.powi(decade)));
    let ticks: Vec<f64> = all.filter(|tick| (low..=high).contains(tick)).collect();
    if ticks.len() < 3 { linear_ticks(low, high) } else { ticks }
}

/// Returns the shortest text that distinguishes a tick from its neighbours.
fn show(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 1e6 => format!("{}M", trim(value / 1e6)),
        size if size >= 1e4 => format!("{}k", trim(value / 1e3)),
        _ => trim(value),
    }
}

fn trim(value: f64) -> String {
    let decimals = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 1.0 {
        2
    } else {
        5
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_view() {
        assert_eq!(linear_ticks(0.0, 104.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(log_ticks(0.8, 12.0), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(log_ticks(0.8e-3, 1.2e3).len(), 7);
        assert_eq!(log_ticks(70.0, 110.0), [70.0, 80.0, 90.0, 100.0, 110.0]);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.001, 0.25, 2.5, 400.0, 12_000.0, 1_500_000.0].map(show);
        assert_eq!(shown, ["0", "0.001", "0.25", "2.5", "400", "12k", "1.5M"]);
    }

    #[test]
    fn what_cannot_be_drawn_is_left_out_and_names_are_escaped() {
        let points = vec![(1.0, 1.0), (f64::INFINITY, 2.0), (0.0, 3.0), (10.0, f64::NAN), (100.0, 4.0)];
        let curve = |name: &str| Curve {
            name: name.to_owned(),
            colour: 9,
            points: points.clone(),
            style: Style::Dots,
        };
        let plot = Plot {
            title: "a & b".to_owned(),
            x: Axis::new("ms", Scale::Log),
            y: Axis::new("share", Scale::Linear),
            curves: vec![curve("<x>"), curve("y")],
            marks: vec![(10.0, "kill".to_owned())],
            shaded: Some((1.0, 50.0)),
        };
        let svg = plot.to_svg();
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(
            svg.contains("a &amp; b")
                && svg.contains("&lt;x&gt;")
                && !svg.contains("NaN")
                && !svg.contains("inf")
        );
    }

    #[test]
    fn an_empty_plot_is_still_a_plot() {
        let (x, y) = (Axis::new("", Scale::Log), Axis::new("", Scale::Linear));
        let plot = Plot { title: String::new(), x, y, curves: vec![], marks: vec![], shaded: None };
        assert!(plot.to_svg().ends_with("</figure>\n"));
    }
}
