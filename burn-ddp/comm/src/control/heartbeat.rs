//! The schedule of heartbeats and the detection of silent peers.
//!
//! These functions take the time as an argument, so that tests can cover what they cannot wait for: that this process
//! was stopped for a minute.

use std::time::{Duration, Instant};

/// Heartbeats within one peer timeout, so that a few may be late before a peer counts as lost.
const HEARTBEATS_PER_TIMEOUT: u32 = 6;
/// Longest time between two heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);

/// The schedule of this rank's heartbeats.
pub(super) struct HeartbeatSchedule {
    timeout: Duration,
    next: Instant,
}

/// A heartbeat that is due.
pub(super) struct DueHeartbeat {
    now: Instant,
    /// Time in which this process was stopped, or too busy to read.
    absent: Duration,
    timeout: Duration,
}

impl HeartbeatSchedule {
    /// The first heartbeat is due at once.
    pub fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, next: now }
    }

    fn interval(&self) -> Duration {
        (self.timeout / HEARTBEATS_PER_TIMEOUT).min(LONGEST_INTERVAL)
    }

    /// Time until the next heartbeat.
    pub fn until(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// The heartbeat that is due, if one is. All sockets must have been read *before* the time `now` was taken.
    pub fn due(&mut self, now: Instant) -> Option<DueHeartbeat> {
        let late = now.checked_duration_since(self.next)?;
        self.next = now + self.interval();
        let absent = if late > self.interval() { late } else { Duration::ZERO };
        Some(DueHeartbeat { now, absent, timeout: self.timeout })
    }
}

/// Time at which a peer last sent something.
pub(super) struct LastHeard(Instant);

impl LastHeard {
    pub fn at(now: Instant) -> Self {
        Self(now)
    }

    /// The silence of the peer if it is longer than the timeout. Time in which this process was absent does not count.
    pub fn too_silent(&mut self, heartbeat: &DueHeartbeat) -> Option<Duration> {
        self.0 = (self.0 + heartbeat.absent).min(heartbeat.now);
        let silence = heartbeat.now.saturating_duration_since(self.0);
        (silence > heartbeat.timeout).then_some(silence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(3);

    /// Runs heartbeats at the given milliseconds after a peer was heard at 0; the silence that was reported last.
    fn silence_after(beats: impl IntoIterator<Item = u64>) -> Option<Duration> {
        let start = Instant::now();
        let (mut schedule, mut heard) = (HeartbeatSchedule::new(TIMEOUT, start), LastHeard::at(start));
        let mut last = None;
        for at in beats {
            if let Some(heartbeat) = schedule.due(start + Duration::from_millis(at)) {
                last = heard.too_silent(&heartbeat);
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
        let mut schedule = HeartbeatSchedule::new(TIMEOUT, start);
        assert!(schedule.due(start).is_some());
        assert!(schedule.due(start + Duration::from_millis(499)).is_none());
        assert_eq!(schedule.until(start + Duration::from_millis(499)), Duration::from_millis(1));
        assert!(schedule.due(start + Duration::from_millis(500)).is_some());
    }
}
