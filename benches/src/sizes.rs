//! Numbers of bytes with units.

/// `4096`, `4KiB`, `1MiB` or `1GiB` in bytes.
///
/// # Errors
/// A text that is no number of bytes, with the reason.
pub fn parse(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        unit => return Err(format!("{unit} is no unit: write B, KiB, MiB or GiB")),
    };
    let count: usize = digits.trim().parse().map_err(|_| format!("{text} is no number of bytes"))?;
    match count.checked_mul(1 << shift) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!("{text} is out of range")),
    }
}

/// The shortest way to write `bytes`: `4 KiB`.
pub fn show(bytes: usize) -> String {
    let (shift, unit) = [(30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        .unwrap_or((0, "B"));
    format!("{} {unit}", bytes >> shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse("4KiB"), Ok(4096));
        assert_eq!(parse("17"), Ok(17));
        assert!(parse("4kb").is_err() && parse("0").is_err() && parse("99999999999GiB").is_err());
        assert_eq!(
            (show(4096), show(4097), show(3 << 20)),
            ("4 KiB".into(), "4097 B".into(), "3 MiB".into())
        );
    }
}
