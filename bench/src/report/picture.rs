//! Draws several plots side by side as one SVG file, for pages that accept images only.

use std::fmt::Write as _;

use crate::report::plot::{HEIGHT, N_COLOURS, Plot, Style, WIDTH, escape};

/// The height above each plot, for its name.
const HEAD: f64 = 30.0;
const LEGEND_LINE: f64 = 16.0;
const GAP: f64 = 20.0;
/// The style sheet of the image: black on white, because an image does not know the colours of its page.
const STYLE: &str = "text{font:11px sans-serif;fill:#66707c} .name{font-weight:bold;font-size:13px;fill:#1b1f24} \
    .grid{stroke:#dfe3e8} .shade{fill:#eef4fb} .curve{fill:none;stroke-width:1.8} .dashed{stroke-dasharray:5 4} \
    .c0{stroke:#0b63c5} .d0{fill:#0b63c5} .c1{stroke:#c4402f} .d1{fill:#c4402f} .c2{stroke:#2a8a4a} .d2{fill:#2a8a4a} \
    .c3{stroke:#8a4fc0} .d3{fill:#8a4fc0} .c4{stroke:#b57600} .d4{fill:#b57600} .c5{stroke:#0f8b8d} .d5{fill:#0f8b8d}";

/// Draws the plots from left to right, each with its legend below it.
pub fn picture(plots: &[Plot]) -> String {
    let n_lines = plots.iter().map(|plot| plot.curves.len()).max().unwrap_or(0);
    let (width, height) =
        (plots.len() as f64 * (WIDTH + GAP), HEAD + HEIGHT + n_lines as f64 * LEGEND_LINE + GAP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\">\n\
         <style>{STYLE}</style><rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (nth, plot) in plots.iter().enumerate() {
        let (left, name) = (nth as f64 * (WIDTH + GAP), escape(&plot.title));
        let _ = write!(
            svg,
            "<g transform=\"translate({left},{HEAD})\"><text class=\"name\" x=\"62\" y=\"-8\">{name}</text>"
        );
        plot.draw(&mut svg);
        legend(&mut svg, plot);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

fn legend(svg: &mut String, plot: &Plot) {
    for (nth, curve) in plot.curves.iter().enumerate() {
        let dashed = if curve.style == Style::Dashed { " dashed" } else { "" };
        let (colour, name) = (curve.colour % N_COLOURS, escape(&curve.name));
        let y = HEIGHT + (nth as f64 + 0.5) * LEGEND_LINE;
        let _ = write!(svg, "<path class=\"curve c{colour}{dashed}\" d=\"M62 {y}H92\"/>");
        let _ = write!(svg, "<text x=\"100\" y=\"{}\">{name}</text>", y + 4.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::plot::{Axis, Curve, Scale};

    #[test]
    fn plots_stand_side_by_side_with_all_their_names() {
        let curve = |name: &str, style| Curve {
            name: name.to_owned(),
            colour: 1,
            points: vec![(1.0, 2.0), (3.0, 4.0)],
            style,
        };
        let plot = |title: &str| Plot {
            title: title.to_owned(),
            x: Axis::new("MiB", Scale::Log),
            y: Axis::new("GB/s", Scale::Linear),
            curves: vec![curve("shm <on>", Style::Dots), curve("plain", Style::Dashed)],
            marks: Vec::new(),
            shaded: None,
        };
        let svg = picture(&[plot("near"), plot("far")]);
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<g ").count(), 2);
        assert_eq!(svg.matches("shm &lt;on&gt;</text>").count(), 2);
        assert!(svg.contains(&format!("translate({},{HEAD})", WIDTH + GAP)));
    }
}
