//! Facts about the host of this process.

/// Name of this host. Messages use it, and ranks with equal names try to share memory. A host without a readable name
/// counts as `localhost`: that is no reason not to train.
pub fn host_name() -> String {
    hostname::get().map_or_else(|_| "localhost".into(), |name| name.to_string_lossy().into_owned())
}

/// Numbers of the cores on which this process may run.
#[cfg(target_os = "linux")]
pub(crate) fn cores() -> Vec<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).map(|core| core as u32).collect()
}

/// Numbers of the cores on which this process may run; other systems than Linux are not asked.
#[cfg(not(target_os = "linux"))]
pub(crate) fn cores() -> Vec<u32> {
    vec![0]
}

/// Memory of this host in bytes. Both are `None` where the system does not tell, as on other systems than Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Memory of the machine.
    pub total: Option<u64>,
    /// Memory that this process can still get: the smaller of what the machine has available and what the limit of its
    /// container leaves.
    pub available: Option<u64>,
}

/// Reads the [`Memory`] of this host.
pub fn memory() -> Memory {
    let machine = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name| number_after(&machine, name).and_then(|kib: u64| kib.checked_mul(1024));
    let available = [kib("MemAvailable:"), container_memory()].into_iter().flatten().min();
    Memory { total: kib("MemTotal:"), available }
}

/// Memory that the container's limit leaves; `None` without a limit, which the file calls `max`.
fn container_memory() -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    // Cached files count as used, but the kernel drops them when it needs room.
    let stat = read("memory.stat").unwrap_or_default();
    let cached = ["inactive_file ", "active_file "].iter().filter_map(|name| number_after(&stat, name)).sum();
    let used = number("memory.current")?.saturating_sub(cached);
    Some(number("memory.max")?.saturating_sub(used))
}

/// The number behind `name`, which begins a line of `text`; a unit of `kB` may follow.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.trim();
    value.strip_suffix("kB").unwrap_or(value).trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_the_start_of_their_line() {
        let text = "MemTotal:       16384 kB\nMemAvailable:     512 kB\ninactive_file 7\nbroken: x\n";
        assert_eq!(number_after(text, "MemTotal:"), Some(16384));
        assert_eq!(number_after(text, "MemAvailable:"), Some(512));
        assert_eq!(number_after(text, "inactive_file "), Some(7));
        assert_eq!(number_after(text, "active_file "), None);
        assert_eq!(number_after(text, "broken:"), None);
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn linux_tells_name_cores_and_memory() {
        assert!(!host_name().is_empty() && !cores().is_empty());
        let Memory { total, available } = memory();
        assert!(available.expect("available") <= total.expect("total"));
    }
}
