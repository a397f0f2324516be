//! Facts about the machine: programs, capabilities, mounts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, MsFlags};

use crate::Error;

/// Bit of CAP_SYS_RESOURCE in the capability sets.
const CAP_SYS_RESOURCE: u32 = 24;

/// Directories in which distributions install the CNI plugins.
const CNI_DIRS: [&str; 3] = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// Directories that are searched after `PATH`, which often lacks the sbin directories.
const SBIN_DIRS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Finds a program in `PATH` and the sbin directories.
pub fn find_program(program: &'static str) -> Result<PathBuf, Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> =
        std::env::split_paths(&path).chain(SBIN_DIRS.iter().map(PathBuf::from)).collect();
    dirs.iter().map(|dir| dir.join(program)).find(|p| p.is_file()).ok_or_else(|| Error::Missing {
        program,
        looked_in: dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(":"),
    })
}

/// Finds the directory of the CNI plugins (`bridge`, `host-local`, `loopback`).
pub fn find_cni_plugins() -> Result<PathBuf, Error> {
    CNI_DIRS
        .iter()
        .map(PathBuf::from)
        .find(|d| d.join("bridge").is_file())
        .ok_or_else(|| Error::Missing { program: "CNI plugin bridge", looked_in: CNI_DIRS.join(":") })
}

/// Returns `PATH` for containerd: `first`, then that of this process, then the sbin directories (runc,
/// iptables).
pub fn path_with(first: &[&Path]) -> OsString {
    let own = std::env::var_os("PATH").unwrap_or_default();
    let dirs = first
        .iter()
        .map(|d| d.to_path_buf())
        .chain(std::env::split_paths(&own))
        .chain(SBIN_DIRS.iter().map(PathBuf::from));
    std::env::join_paths(dirs).unwrap_or(own)
}

/// Returns whether this process may lower OOM scores and raise limits (CAP_SYS_RESOURCE is effective).
pub fn has_sys_resource() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| effective_has(&status, CAP_SYS_RESOURCE))
}

fn effective_has(status: &str, bit: u32) -> bool {
    status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|set| set & (1 << bit) != 0)
}

/// Returns whether iptables exists and its nat table can be read.
pub fn iptables_works() -> bool {
    ["iptables", "iptables-save", "iptables-restore"].iter().all(|p| find_program(p).is_ok())
        && Command::new("iptables")
            .args(["-w", "-t", "nat", "-S"])
            .env("PATH", path_with(&[]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
}

/// Returns whether an overlay can be mounted with its upper directory below `dir`. It cannot if `dir` is on
/// an overlay itself.
pub fn overlay_works(dir: &Path) -> bool {
    let Ok(temp) = tempfile::Builder::new().prefix("overlay-probe").tempdir_in(dir) else { return false };
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|n| temp.path().join(n));
    if [&lower, &upper, &work, &merged].iter().any(|d| std::fs::create_dir(d).is_err()) {
        return false;
    }
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mounted = nix::mount::mount(
        Some("overlay"),
        &merged,
        Some("overlay"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .is_ok();
    mounted && nix::mount::umount2(&merged, MntFlags::MNT_DETACH).is_ok()
}

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount point.
    pub point: PathBuf,
    /// File system type.
    pub fs: String,
}

/// Returns the mounts of this mount namespace, in mount order.
pub fn mounts() -> Vec<Mount> {
    parse_mountinfo(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

fn parse_mountinfo(text: &str) -> Vec<Mount> {
    text.lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let point = before.split(' ').nth(4)?;
            let fs = after.split(' ').next()?;
            Some(Mount { point: PathBuf::from(unescape(point)), fs: fs.to_owned() })
        })
        .collect()
}

/// Decodes the octal escapes of mountinfo (`\040` for a space).
fn unescape(field: &str) -> OsString {
    use std::os::unix::ffi::OsStringExt;
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = (bytes[at] == b'\\')
            .then(|| field.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok()))
            .flatten();
        match octal {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    OsString::from_vec(out)
}

/// Major and minor version, which determine the format of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerdVersion {
    /// Major version, such as 1 or 2.
    pub major: u32,
    /// Minor version, such as 6 in 1.6.
    pub minor: u32,
}

/// Returns the version of a containerd binary.
pub fn containerd_version(binary: &Path) -> Result<ContainerdVersion, Error> {
    let failed =
        |message: String| Error::Program { program: format!("{} --version", binary.display()), message };
    let output = Command::new(binary).arg("--version").output().map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_version(&text).ok_or_else(|| failed(format!("no version in {:?}", text.trim())))
}

fn parse_version(text: &str) -> Option<ContainerdVersion> {
    let version = text.split_whitespace().nth(2)?.trim_start_matches('v');
    let mut numbers = version.split('.');
    Some(ContainerdVersion { major: numbers.next()?.parse().ok()?, minor: numbers.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_from_the_output_of_containerd() {
        let cases = [
            ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", Some((1, 6))),
            ("containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da", Some((1, 7))),
            ("containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b7", Some((2, 1))),
            ("containerd github.com/containerd/containerd/v2 2.0.5~ds1 2.0.5", Some((2, 0))),
            ("containerd", None),
            ("", None),
        ];
        for (text, want) in cases {
            assert_eq!(parse_version(text).map(|v| (v.major, v.minor)), want, "{text:?}");
        }
    }

    #[test]
    fn a_capability_is_looked_up_in_the_effective_set_only() {
        let status =
            |eff: &str| format!("CapPrm:\t000001ffffffffff\nCapEff:\t{eff}\nCapBnd:\t000001ffffffffff\n");
        assert!(effective_has(&status("000001ffffffffff"), CAP_SYS_RESOURCE));
        assert!(!effective_has(&status("000001fffeffffff"), CAP_SYS_RESOURCE));
        assert!(!effective_has("", CAP_SYS_RESOURCE));
    }

    #[test]
    fn mount_points_are_unescaped_and_optional_fields_skipped() {
        let text = "36 35 98:0 / /mnt/a\\040b rw,noatime shared:1 master:2 - ext4 /dev/root rw\n\
                    37 35 0:4 net:[4026532] /run/netns/x rw - nsfs nsfs rw\nnonsense\n";
        let want = [("/mnt/a b", "ext4"), ("/run/netns/x", "nsfs")]
            .map(|(point, fs)| Mount { point: PathBuf::from(point), fs: fs.to_owned() });
        assert_eq!(parse_mountinfo(text), want);
    }
}
