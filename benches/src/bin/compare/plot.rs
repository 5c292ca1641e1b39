//! Bandwidth by size of the four systems, as a picture.

use plotters::prelude::*;

use crate::rounds::{Rounds, Statistic, System};

const SIZE: (u32, u32) = (760, 440);
const SYSTEMS: [(System, &str, RGBColor); 4] = [
    (System::Limit, "bound", RGBColor(130, 130, 130)),
    (System::Ours, "burn-ddp", RGBColor(200, 40, 40)),
    (System::Mpi, "Open MPI", RGBColor(40, 90, 200)),
    (System::Gloo, "Gloo", RGBColor(30, 140, 60)),
];

/// An SVG of the f32 `all_reduce` of two processes: bytes over time. Empty axes where nothing was measured.
pub(crate) fn all_reduce(rounds: &Rounds) -> Result<String, String> {
    let mut text = String::new();
    draw(&mut text, rounds).map_err(|error| format!("cannot draw: {error}"))?;
    Ok(text)
}

fn draw(text: &mut String, rounds: &Rounds) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("all_reduce of f32, 2 processes", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d((2e3..1.5e8).log_scale(), (3e-3..30.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bytes on each process")
        .y_desc("GB/s")
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|bandwidth| format!("{bandwidth}"))
        .light_line_style(RGBColor(240, 240, 240))
        .draw()?;
    let keys = rounds.keys();
    let of_two = |key: &&crate::Key| key.world == 2 && key.bench == "all_reduce" && key.dtype == "f32";
    for (system, name, color) in SYSTEMS {
        let point = |key: &crate::Key| {
            let time = rounds.time(key, system, Statistic::Minimum)?;
            Some((key.bytes as f64, key.bytes as f64 / time / 1e3))
        };
        let points: Vec<_> = keys.iter().filter(of_two).filter_map(point).collect();
        chart
            .draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE)
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    area.present()?;
    Ok(())
}

/// A label of the axis, in decimal units as its ticks are.
fn size(bytes: f64) -> String {
    let (unit, scale) = if bytes >= 1e6 { ("MB", 1e6) } else { ("kB", 1e3) };
    format!("{} {unit}", bytes / scale)
}
