//! Protects this process from the node's pressure: its score for the kernel's choice of a process to kill,
//! and its open files.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::resource::{Resource, setrlimit};
use prometheus_client::encoding::EncodeLabelSet;

/// Open files of a service without a setting of its own: `LimitNOFILE` of the systemd units.
const FILES_OF_A_SERVICE: u64 = 65_536;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Setting {
    setting: &'static str,
}

/// Settings of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnLimits {
    /// `oomScoreAdj`.
    pub oom_score_adj: i32,
    /// `maxOpenFiles`; `None` leaves the limit as it is.
    pub open_files: Option<u64>,
}

impl OwnLimits {
    /// Applies the settings to this process. A setting that needs a missing capability is logged once and set
    /// in the gauge `quintlet_process_setting_missing`. The process runs without it.
    pub fn apply(self) {
        let missing = quintlet_telemetry::metrics::gauge_family(
            "quintlet_process_setting_missing",
            "Whether a setting of the process could not be applied (1 or 0)",
        );
        let results = [
            ("oom_score_adj", Some(set_oom_score_adj(Path::new("/proc/self"), self.oom_score_adj))),
            ("open_files", self.open_files.map(|wanted| set_open_files(Path::new("/proc/self"), wanted))),
        ];
        for (setting, result) in results {
            let Some(result) = result else { continue };
            missing.get_or_create(&Setting { setting }).set(i64::from(result.is_err()));
            if let Err(error) = result {
                tracing::warn!(setting, %error, "failed to apply a setting of this process, CAP_SYS_RESOURCE is needed");
            }
        }
    }
}

/// Raises the soft limit of open files to the hard limit, at most to [`FILES_OF_A_SERVICE`], as Go's runtime
/// does for a kubelet. A shell has 1,024, which the connections of a few pods with many probes use up.
pub(crate) fn raise_open_files() {
    let process = Path::new("/proc/self");
    let limits = fs::read_to_string(process.join("limits")).ok().and_then(|limits| open_files(&limits));
    let Some((wanted, hard)) = limits.and_then(|(soft, hard)| Some((raised(soft, hard)?, hard))) else {
        return;
    };
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
        tracing::warn!(%error, wanted, "failed to raise the limit of open files of this process");
    }
}

/// Returns the soft limit to set, or `None` if it is high enough or as high as possible.
fn raised(soft: u64, hard: u64) -> Option<u64> {
    let wanted = hard.min(FILES_OF_A_SERVICE);
    (soft < wanted).then_some(wanted)
}

/// Writes the score unless it is set already, so that a service manager can set it for a process without the
/// capability.
fn set_oom_score_adj(process: &Path, wanted: i32) -> io::Result<()> {
    let file = process.join("oom_score_adj");
    if fs::read_to_string(&file)?.trim().parse() == Ok(wanted) {
        return Ok(());
    }
    fs::write(&file, wanted.to_string())
}

/// Sets the soft and the hard limit of open files. Without the capability, the soft limit becomes the hard
/// limit.
fn set_open_files(process: &Path, wanted: u64) -> io::Result<()> {
    let (soft, hard) = open_files(&fs::read_to_string(process.join("limits"))?).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "no limit of open files in /proc/self/limits")
    })?;
    if (soft, hard) == (wanted, wanted) {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).or_else(|error| {
        if soft < hard.min(wanted) {
            setrlimit(Resource::RLIMIT_NOFILE, hard.min(wanted), hard)?;
        }
        if hard >= wanted { Ok(()) } else { Err(error) }
    })?;
    Ok(())
}

/// Returns the soft and the hard limit in the text of `/proc/<pid>/limits`. getrlimit(2) may be forbidden by
/// a seccomp filter.
fn open_files(limits: &str) -> Option<(u64, u64)> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let limit = |word: &str| if word == "unlimited" { Some(u64::MAX) } else { word.parse().ok() };
    let mut words = line.split_whitespace();
    Some((limit(words.next()?)?, limit(words.next()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_written_only_if_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("oom_score_adj");
        fs::write(&file, "-999\n").unwrap();
        set_oom_score_adj(dir.path(), -999).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "-999\n", "not written");
        set_oom_score_adj(dir.path(), -500).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "-500");
        assert!(set_oom_score_adj(&dir.path().join("none"), 0).is_err());
    }

    #[test]
    fn a_soft_limit_of_open_files_is_raised_and_never_lowered() {
        let all = FILES_OF_A_SERVICE;
        for (soft, hard, want) in [
            (1024, u64::MAX, Some(all)),
            (1024, 4096, Some(4096)),
            (4096, 4096, None),
            (all, u64::MAX, None),
            (1_000_000, 1_000_000, None),
        ] {
            assert_eq!(raised(soft, hard), want, "{soft} {hard}");
        }
    }

    #[test]
    fn limits_of_open_files_are_read_from_proc() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max core file size        0                    unlimited            bytes     \n\
                      Max open files            1024                 524288               files     \n";
        assert_eq!(open_files(limits), Some((1024, 524_288)));
        assert_eq!(
            open_files("Max open files            unlimited            unlimited            files"),
            Some((u64::MAX, u64::MAX))
        );
        assert_eq!(open_files("Max open files            x  y  files"), None);
        let (soft, hard) = open_files(&fs::read_to_string("/proc/self/limits").unwrap()).unwrap();
        set_open_files(Path::new("/proc/self"), hard).unwrap();
        let now = open_files(&fs::read_to_string("/proc/self/limits").unwrap()).unwrap();
        assert_eq!(now, (hard, hard), "the soft limit was {soft}");
    }
}
