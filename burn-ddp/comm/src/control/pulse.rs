//! When to send a heartbeat, and how late this process is itself.
//!
//! Pure, with the time as an argument, because the cases that matter (this process was stopped for a minute)
//! are cases that a test cannot wait for.

use std::time::{Duration, Instant};

/// Heartbeats in one peer timeout: a few may be late before anybody is accused.
const BEATS: u32 = 6;
const SLOWEST: Duration = Duration::from_secs(1);

/// The rhythm of this rank's heartbeats.
pub(super) struct Pulse {
    timeout: Duration,
    due: Instant,
}

/// A heartbeat is to be sent now.
pub(super) struct Beat {
    now: Instant,
    /// How long this process did not listen although it was to.
    absent: Duration,
    timeout: Duration,
}

impl Pulse {
    /// The first beat is due at once.
    pub fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, due: now }
    }

    fn interval(&self) -> Duration {
        (self.timeout / BEATS).min(SLOWEST)
    }

    /// Time until the next beat.
    pub fn until(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }

    /// The beat that is due, if one is. What the sockets hold must have been read *before* `now` was taken.
    pub fn beat(&mut self, now: Instant) -> Option<Beat> {
        let late = now.checked_duration_since(self.due)?;
        self.due = now + self.interval();
        let absent = if late > self.interval() { late } else { Duration::ZERO };
        Some(Beat { now, absent, timeout: self.timeout })
    }
}

/// When a peer was last heard of.
pub(super) struct Heard(Instant);

impl Heard {
    pub fn at(now: Instant) -> Self {
        Self(now)
    }

    /// The silence if it is longer than the timeout. Time in which this process was absent does not count.
    pub fn too_silent(&mut self, beat: &Beat) -> Option<Duration> {
        self.0 = (self.0 + beat.absent).min(beat.now);
        let silence = beat.now.saturating_duration_since(self.0);
        (silence > beat.timeout).then_some(silence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(3);

    /// Runs beats at the given milliseconds after a peer was heard at 0; the silence that was reported last.
    fn silence_after(beats: impl IntoIterator<Item = u64>) -> Option<Duration> {
        let start = Instant::now();
        let (mut pulse, mut heard) = (Pulse::new(TIMEOUT, start), Heard::at(start));
        let mut last = None;
        for at in beats {
            if let Some(beat) = pulse.beat(start + Duration::from_millis(at)) {
                last = heard.too_silent(&beat);
            }
        }
        last
    }

    #[test]
    fn a_silent_peer_is_found_soon_after_the_timeout() {
        assert_eq!(silence_after((0..=3000).step_by(10)), None);
        assert!(silence_after((0..=3600).step_by(10)).is_some());
    }

    #[test]
    fn own_absence_is_not_the_silence_of_others() {
        assert_eq!(silence_after([0, 500, 60_000]), None);
        // It goes on counting from there: half a second before, three after.
        assert_eq!(silence_after([0, 500, 60_000, 60_500, 61_000, 61_500, 62_000]), None);
        assert!(silence_after((0..=500).step_by(100).chain((60_000..=63_600).step_by(100))).is_some());
    }

    #[test]
    fn a_beat_is_due_at_each_interval_only() {
        let start = Instant::now();
        let mut pulse = Pulse::new(TIMEOUT, start);
        assert!(pulse.beat(start).is_some());
        assert!(pulse.beat(start + Duration::from_millis(499)).is_none());
        assert_eq!(pulse.until(start + Duration::from_millis(499)), Duration::from_millis(1));
        assert!(pulse.beat(start + Duration::from_millis(500)).is_some());
    }
}
