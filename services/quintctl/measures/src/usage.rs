//! What a process uses, from `/proc`.

/// Clock ticks of /proc per second (`USER_HZ`), which is 100 on all common architectures.
const TICKS: f64 = 100.0;

/// Returns the CPU time of a process in seconds.
#[must_use]
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.get(text.rfind(')')?.saturating_add(1)..)?.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS)
}

/// Returns the proportional set size in bytes, since shared pages of one binary must not count once per
/// process. Only root may read it for processes of other users; without it the resident set size is returned.
#[must_use]
pub fn memory(pid: u32) -> Option<u64> {
    let kib = |path: &str, key: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/{path}")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    kib("smaps_rollup", "Pss:").or_else(|| kib("status", "VmRSS:")).map(|kib| kib.saturating_mul(1024))
}
