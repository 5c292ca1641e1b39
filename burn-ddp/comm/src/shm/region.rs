//! Memory in which each member has a counter and four slots, and the steps in which the members use it.
//!
//! ```text
//! ┌───────────┬───────────┬─ ... ┬────────┬────────┬────────┬────────┬────────┬─ ...
//! │ counter 0 │ counter 1 │      │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ slot 0 │
//! └───────────┴───────────┴─ ... ┴────────┴────────┴────────┴────────┴────────┴─ ...
//!   one for each member            of member 0; step s uses slot s % 4   of member 1
//! ```
//!
//! A [`StepAccess`] is what a member gets when all members have published step `s`: it may read the slots of `s` and
//! write its own slot of `s + 1`, and publishing ends it. No slot is read while it is written, because:
//!
//! - Only its owner writes a slot, and others read it only after the owner has published the step.
//! - A member that writes the slot of `s + 1` overwrites its own slot of `s - 3` (of `s - 1` if there were two). It has
//!   seen all members publish `s`, and a member publishes `s` after it has read `s - 1` and all before it.
//! - A `StepAccess` borrows the region mutably, so the compiler refuses a member that reads or writes outside of it.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::Mapping;
use super::spin::{ComputeHint, MAX_SLEEP, SpinPolicy};
use super::step_counter::StepCounter;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::{Liveness, PeerState};

/// Slots begin at pages.
const PAGE: usize = 4096;
/// Number of slots of a member. Two would be correct. With two, a member overwrites memory that is still in the caches
/// of the members that have just read it, which is slow; with four, it has left these caches. An `all_reduce` of 1 MiB
/// between two ranks took 118 us with two slots, 66 us with four and 58 us with eight.
const SLOTS: usize = 4;

/// The members of a region and its layout; equal on all of them.
#[derive(Clone, Debug)]
pub(crate) struct RegionLayout {
    /// Ranks in ascending order.
    pub members: Vec<Rank>,
    /// Number of cores on which at least one of them may run, capped by the smallest CPU quota (of a cgroup) among
    /// them.
    pub cores: usize,
}

impl RegionLayout {
    /// Bytes of one slot: at most 260 KiB, so that what is written is still in the second-level cache of its writer
    /// when the others read it. From 9 members on slots are smaller, which keeps the region below 10 MiB for up to 64
    /// members. From about 128 members on the minimum for each member counts, and the region grows with the square of
    /// their number.
    fn slot_bytes(&self) -> usize {
        const MOST: usize = 256 << 10;
        let share = (8 << 20) / (SLOTS * self.members.len().max(1));
        // At least as much as a counter (two cache lines) for each member, and one more page, in which the header fits.
        let least = (self.members.len() * size_of::<StepCounter>()).next_multiple_of(PAGE);
        (MOST.min(share) / PAGE * PAGE).max(least) + PAGE
    }

    fn counter_bytes(&self) -> usize {
        (self.members.len() * size_of::<StepCounter>()).next_multiple_of(PAGE)
    }

    /// Bytes of the whole region.
    pub fn bytes(&self) -> usize {
        self.counter_bytes() + SLOTS * self.members.len() * self.slot_bytes()
    }
}

/// One member's view of the memory that it shares with others. See the [module documentation](self).
pub(crate) struct SharedRegion {
    layout: RegionLayout,
    slot_bytes: usize,
    /// This rank's position among the members.
    me: usize,
    /// Number of steps that this rank has published.
    step: u32,
    /// True if all others are known to have published that step.
    complete: bool,
    liveness: Liveness,
    spin: SpinPolicy,
    start: NonNull<u8>,
    _memory: Box<dyn Any + Send>,
}

// SAFETY: the pointer is into `_memory`, which may be moved between threads; a `StepAccess` borrows the region mutably.
unsafe impl Send for SharedRegion {}

impl SharedRegion {
    /// The region of `layout` in `mapping`, which is zeroed when its first member comes, for the member at position
    /// `me`.
    pub fn new(
        layout: RegionLayout,
        me: usize,
        mapping: Mapping,
        liveness: Liveness,
        hint: ComputeHint,
    ) -> Self {
        let start = mapping.start(layout.bytes());
        // SAFETY: a mapping of exactly that many bytes, zeroed when it was reserved. It is moved into this region, and
        // other processes get it from `connect` as other members.
        unsafe { Self::over(layout, me, start, Box::new(mapping), liveness, hint) }
    }

    /// # Safety
    /// `start` must be the beginning of `layout.bytes()` bytes, aligned to a page, zeroed before the first region is
    /// made, alive as long as `memory`, and used by one region for each member and nothing else.
    unsafe fn over(
        layout: RegionLayout,
        me: usize,
        start: NonNull<u8>,
        memory: Box<dyn Any + Send>,
        liveness: Liveness,
        hint: ComputeHint,
    ) -> Self {
        assert!(me < layout.members.len(), "member {me} of {}", layout.members.len());
        let spin = SpinPolicy::new(layout.cores, layout.members.len(), hint);
        let slot_bytes = layout.slot_bytes();
        Self { layout, slot_bytes, me, step: 0, complete: true, liveness, spin, start, _memory: memory }
    }

    /// The ranks that share the region, in ascending order.
    pub fn members(&self) -> &[Rank] {
        &self.layout.members
    }

    /// This rank's position among the members.
    pub fn position(&self) -> usize {
        self.me
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Waits until all members have published as many steps as this rank. It may then read that step and write the
    /// next.
    ///
    /// # Errors
    /// `Timeout` naming the first rank that is missing, `PeerLost`, and other causes for which the group has ended;
    /// `operation` says in which operation. The group ends with any of them.
    pub fn wait_for_step(
        &mut self,
        operation: &impl fmt::Display,
        deadline: Deadline,
    ) -> Result<StepAccess<'_>> {
        if !self.complete {
            for member in (0..self.layout.members.len()).filter(|member| *member != self.me) {
                self.wait_for_member(member, deadline).map_err(|error| {
                    self.fail(error.context(format_args!("{} in {operation}", self.layout.members[self.me])))
                })?;
            }
            self.complete = true;
        }
        Ok(StepAccess { region: self })
    }

    /// Ends the group because of `error`; returns the earlier cause if the group has ended before.
    pub fn fail(&self, error: Error) -> Error {
        self.liveness.fail(error.clone());
        self.liveness.cause().unwrap_or(error)
    }

    fn wait_for_member(&self, member: usize, deadline: Deadline) -> Result<()> {
        let (counter, peer) = (self.counter(member), self.layout.members[member]);
        if self.spin.poll(|| counter.has_reached(self.step)) {
            return Ok(());
        }
        loop {
            let cause = self.liveness.check();
            let finished = matches!(self.liveness.peer(peer), PeerState::Finished);
            // In this order: a rank that has left, or has ended the group, may have published this step before.
            if counter.has_reached(self.step) {
                return Ok(());
            }
            cause?;
            if finished {
                return Err(self.liveness.closed_by(peer, deadline));
            }
            if deadline.passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "waited {:?} for {peer}, which shares this host's memory; nobody is known to be dead, so it is \
                         slow or never calls this operation",
                        deadline.limit()
                    ),
                ));
            }
            counter.sleep(self.step, MAX_SLEEP.min(deadline.remaining()));
        }
    }

    fn counter(&self, member: usize) -> &StepCounter {
        assert!(member < self.layout.members.len(), "member {member} of {}", self.layout.members.len());
        // SAFETY: counters stand at the beginning, one for each member, aligned and zeroed, and are only used by
        // reference.
        unsafe { self.start.cast::<StepCounter>().add(member).as_ref() }
    }

    /// The slot in which `member` writes for `step`.
    fn slot(&self, member: usize, step: u32) -> NonNull<u8> {
        assert!(member < self.layout.members.len(), "member {member} of {}", self.layout.members.len());
        let offset = self.layout.counter_bytes() + (SLOTS * member + step as usize % SLOTS) * self.slot_bytes;
        // SAFETY: `RegionLayout::bytes` counts `SLOTS` slots for each member behind the counters.
        unsafe { self.start.add(offset) }
    }
}

/// The time between two steps of a member: all members have published as many steps as it has. See
/// [`SharedRegion::wait_for_step`].
pub(crate) struct StepAccess<'a> {
    region: &'a mut SharedRegion,
}

impl StepAccess<'_> {
    /// All members' slots of the last step, and this rank's slot for the next step, whose content is left over from an
    /// earlier step.
    pub fn slots(&mut self) -> (PublishedSlots<'_>, &mut [u8]) {
        let region = &*self.region;
        let own = region.slot(region.me, region.step.wrapping_add(1));
        // SAFETY: a slot of `slot_bytes` initialized bytes. Only this rank writes it, through this exclusive borrow,
        // and no rank reads it: `step + 1` is not published, and all ranks have read all steps before `step` (module
        // docs).
        let own = unsafe { std::slice::from_raw_parts_mut(own.as_ptr(), region.slot_bytes) };
        (PublishedSlots { region, step: region.step, lifetime: PhantomData }, own)
    }

    /// This rank's slot for the next step.
    pub fn own_slot(&mut self) -> &mut [u8] {
        self.slots().1
    }

    /// Publishes this rank's slot for the next step, and gives up reading those of the last one.
    pub fn publish(self) {
        let region = self.region;
        region.step = region.step.wrapping_add(1);
        region.complete = region.layout.members.len() == 1;
        region.counter(region.me).publish(region.step);
    }
}

/// The slots of all members in one step.
#[derive(Clone, Copy)]
pub(crate) struct PublishedSlots<'a> {
    region: &'a SharedRegion,
    step: u32,
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> PublishedSlots<'a> {
    /// The bytes that the member at this position has written.
    pub fn of(&self, member: usize) -> &'a [u8] {
        let slot = self.region.slot(member, self.step);
        // SAFETY: a slot of that many initialized bytes, published with release and seen with acquire. Its owner writes
        // there again for a step after `step + 1` only, once this rank has published that, which ends this borrow.
        unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.region.slot_bytes) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[repr(C, align(4096))]
    #[derive(Clone)]
    struct Page([u8; PAGE]);

    /// Regions over memory of this process, so that Miri can watch them.
    pub(crate) fn regions(ranks: usize) -> Vec<SharedRegion> {
        let layout = RegionLayout { members: (0..ranks).map(Rank).collect(), cores: 1 };
        let pages = vec![Page([0; PAGE]); layout.bytes() / PAGE].into_boxed_slice();
        let start = NonNull::new(Box::into_raw(pages).cast::<u8>()).unwrap();
        struct Pages(NonNull<u8>, usize);
        // SAFETY: owned memory.
        unsafe impl Send for Pages {}
        // SAFETY: only its address is read.
        unsafe impl Sync for Pages {}
        impl Drop for Pages {
            fn drop(&mut self) {
                let pages = std::ptr::slice_from_raw_parts_mut(self.0.as_ptr().cast::<Page>(), self.1);
                // SAFETY: from `Box::into_raw` above.
                drop(unsafe { Box::from_raw(pages) });
            }
        }
        let memory = Arc::new(Pages(start, layout.bytes() / PAGE));
        let liveness = Liveness::new(ranks);
        let region = |me| {
            let (memory, liveness) = (Box::new(memory.clone()), liveness.clone());
            // SAFETY: zeroed pages of that size, held by each region, one region for each member.
            unsafe { SharedRegion::over(layout.clone(), me, start, memory, liveness, ComputeHint::default()) }
        };
        (0..ranks).map(region).collect()
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[test]
    fn every_member_reads_what_all_members_wrote_in_every_step() {
        let steps: u8 = if cfg!(miri) { 8 } else { 200 };
        std::thread::scope(|scope| {
            for mut region in regions(3) {
                scope.spawn(move || {
                    let me = region.position() as u8;
                    for step in 0..steps {
                        let mut access = region.wait_for_step(&"test", soon()).unwrap();
                        let (theirs, own) = access.slots();
                        if step > 0 {
                            for member in 0..3u8 {
                                assert_eq!(theirs.of(member.into())[..2], [member, step - 1]);
                            }
                        }
                        own[..2].copy_from_slice(&[me, step]);
                        access.publish();
                    }
                    // No member leaves before all have read.
                    region.wait_for_step(&"test", soon()).unwrap().publish();
                    region.wait_for_step(&"test", soon()).unwrap();
                });
            }
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let mut regions = regions(2);
        let region = &mut regions[0];
        region.wait_for_step(&"a test", soon()).unwrap().publish();
        let error = region.wait_for_step(&"a test", Deadline::after(Duration::from_millis(5))).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(text.contains("rank 0 in a test") && text.contains("for rank 1"), "{text}");
        // The group has ended with it.
        assert_eq!(regions[1].liveness.cause().unwrap().to_string(), text);
    }

    #[test]
    fn a_rank_that_has_left_in_good_order_is_not_waited_for() {
        let mut regions = regions(2);
        let liveness = regions[0].liveness.clone();
        regions[1].wait_for_step(&"test", soon()).unwrap().publish();
        liveness.set_peer(Rank(1), PeerState::Finished);
        regions[0].wait_for_step(&"test", soon()).unwrap().publish();
        // It had published this step before it left, but will not publish another one.
        regions[0].wait_for_step(&"test", soon()).unwrap().publish();
        let error = regions[0].wait_for_step(&"test", soon()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerFinished(Rank(1)));
    }

    #[test]
    fn a_region_stays_small() {
        for ranks in 1..=64 {
            let layout = RegionLayout { members: (0..ranks).map(Rank).collect(), cores: 1 };
            assert!(
                layout.bytes() <= 10 << 20 && layout.slot_bytes() >= 32 << 10,
                "{ranks}: {}",
                layout.bytes()
            );
        }
        // A cache line for each peer, however many there are.
        let layout = RegionLayout { members: (0..1024).map(Rank).collect(), cores: 1 };
        assert!(layout.slot_bytes() - PAGE >= 1023 * 64, "{}", layout.slot_bytes());
    }
}
