//! Draws stacked bars as an SVG file.

use std::fmt::Write as _;

use crate::report::plot::escape;

const WIDTH: f64 = 720.0;
const BAR_HEIGHT: f64 = 20.0;
const GAP: f64 = 6.0;
const LEFT: f64 = 150.0;
const TOP: f64 = 28.0;
const LEGEND_LINE: f64 = 16.0;
const LEGEND_COLUMNS: usize = 4;
const STYLE: &str = "text{font:11px sans-serif;fill:#1b1f24} .name{font-weight:bold;font-size:13px}";

/// Horizontal bars, each divided into the same parts.
#[derive(Clone, Debug)]
pub struct StackedBars {
    pub title: String,
    /// The names of the parts, in the order of drawing.
    pub parts: Vec<String>,
    pub bars: Vec<Bar>,
}

/// One bar: its name, and the size of each part in milliseconds.
#[derive(Clone, Debug)]
pub struct Bar {
    pub name: String,
    pub sizes: Vec<f64>,
}

impl Bar {
    fn sum(&self) -> f64 {
        self.sizes.iter().sum()
    }
}

/// Draws the groups of bars below each other.
pub fn bars(groups: &[StackedBars]) -> String {
    let (mut drawn, mut y) = (String::new(), 0.0);
    for group in groups {
        let _ = write!(drawn, "<g transform=\"translate(0,{y})\">");
        y += group.draw(&mut drawn);
        drawn.push_str("</g>\n");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" width=\"{WIDTH}\">\n\
         <style>{STYLE}</style><rect width=\"{WIDTH}\" height=\"{y}\" fill=\"#fff\"/>\n{drawn}</svg>\n"
    )
}

impl StackedBars {
    /// Draws the group, and returns its height.
    fn draw(&self, svg: &mut String) -> f64 {
        let longest = self.bars.iter().map(Bar::sum).fold(f64::MIN_POSITIVE, f64::max);
        let scale = (WIDTH - LEFT - 80.0) / longest;
        let _ = write!(svg, "<text class=\"name\" x=\"8\" y=\"18\">{}</text>", escape(&self.title));
        let mut y = TOP;
        for bar in &self.bars {
            self.draw_bar(svg, bar, y, scale);
            y += BAR_HEIGHT + GAP;
        }
        y + self.legend(svg, y) + GAP
    }

    fn draw_bar(&self, svg: &mut String, bar: &Bar, y: f64, scale: f64) {
        let middle = y + BAR_HEIGHT * 0.7;
        let name = escape(&bar.name);
        let _ = write!(svg, "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{name}</text>", LEFT - 6.0);
        let mut x = LEFT;
        for (nth, size) in bar.sizes.iter().enumerate().filter(|(_, size)| **size > 0.0) {
            let (width, colour, part) = (size * scale, colour(nth), escape(&self.parts[nth]));
            let _ = write!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR_HEIGHT}\" fill=\"{colour}\">\
                 <title>{part}: {size:.2} ms</title></rect>"
            );
            x += width;
        }
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{middle}\">{:.1} ms</text>", x + 4.0, bar.sum());
    }

    /// Draws the names of the parts that any bar has, and returns the height of the list.
    fn legend(&self, svg: &mut String, top: f64) -> f64 {
        let has = |nth: &usize| self.bars.iter().any(|bar| bar.sizes[*nth] > 0.0);
        let shown: Vec<usize> = (0..self.parts.len()).filter(has).collect();
        for (place, nth) in shown.iter().enumerate() {
            let x = 8.0 + (place % LEGEND_COLUMNS) as f64 * (WIDTH - 16.0) / LEGEND_COLUMNS as f64;
            let y = top + (place / LEGEND_COLUMNS) as f64 * LEGEND_LINE;
            let (colour, part) = (colour(*nth), escape(&self.parts[*nth]));
            let _ = write!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>");
            let _ = write!(svg, "<text x=\"{}\" y=\"{}\">{part}</text>", x + 14.0, y + 9.0);
        }
        shown.len().div_ceil(LEGEND_COLUMNS) as f64 * LEGEND_LINE
    }
}

/// Returns the colour of a part: neighbours are far apart on the circle of hues.
fn colour(nth: usize) -> String {
    format!("hsl({},55%,{}%)", nth * 137 % 360, 48 + nth % 3 * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_has_its_parts_and_the_legend_those_with_any_size() {
        let bar = |name: &str, sizes: [f64; 3]| Bar { name: name.to_owned(), sizes: sizes.to_vec() };
        let group = StackedBars {
            title: "a & b".to_owned(),
            parts: ["reserve", "none", "decode"].map(str::to_owned).to_vec(),
            bars: vec![bar("all", [1.0, 0.0, 3.0]), bar("slowest", [8.0, 0.0, 0.0])],
        };
        let svg = bars(&[group]);
        assert!(svg.starts_with("<svg xmlns=") && svg.contains("a &amp; b"), "{svg}");
        assert_eq!(svg.matches("<title>").count(), 3);
        assert!(svg.contains("reserve: 8.00 ms") && svg.contains(">4.0 ms<") && !svg.contains(">none<"));
    }
}
