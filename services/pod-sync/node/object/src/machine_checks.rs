//! Checks of the machine before pod-sync starts: swap, the version of cgroups, kernel tunables.

use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::error_chain;

/// Kernel tunables below `/proc/sys`, and the values that pods rely on
/// (`k8s.io/component-helpers/node/util/sysctl`).
const TUNABLES: [(&str, i64); 6] = [
    // Memory may be overcommitted: the limits of pods decide.
    ("vm/overcommit_memory", 1),
    // Out of memory, the kernel kills a process and does not panic.
    ("vm/panic_on_oom", 0),
    // Seconds from a panic to the reboot.
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    // Each container takes a session keyring of root.
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// Requirements of the configuration that the machine must meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MachineRules {
    /// `failSwapOn`.
    pub fail_swap_on: bool,
    /// `failCgroupV1`.
    pub fail_cgroup_v1: bool,
    /// `memorySwap.swapBehavior` is `LimitedSwap`.
    pub limited_swap: bool,
    /// `protectKernelDefaults`: wrong kernel tunables are errors.
    pub protect_kernel_defaults: bool,
    /// Wrong kernel tunables are set.
    pub set_kernel_tunables: bool,
    /// The feature gate KubeletInUserNamespace is on: in a user namespace, a kernel tunable that cannot be
    /// set is no error.
    pub tolerates_user_namespace: bool,
}

/// The machine does not fulfil the configuration. The texts are those of the kubelet.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The machine has cgroup v1, and `failCgroupV1` is on.
    #[error(
        "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed in a \
         future release"
    )]
    CgroupV1,
    /// The machine swaps, and `failSwapOn` is on.
    #[error("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false")]
    SwapOn,
    /// The list of swap areas cannot be read.
    #[error("failed to determine if swap is on: {}: {source}", path.display())]
    Swaps {
        /// Path of the list.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// `memorySwap.swapBehavior: LimitedSwap` on cgroup v1.
    #[error("swap feature is enabled and LimitedSwap but it is only supported with cgroupv2")]
    LimitedSwap,
    /// Kernel tunables are wrong, and `protectKernelDefaults` is on.
    #[error("{}", aggregate(wrong))]
    Tunables {
        /// Each tunable that differs, or cannot be read.
        wrong: Vec<TunableError>,
    },
}

/// A kernel tunable is wrong and stays so.
#[derive(Debug, thiserror::Error)]
pub enum TunableError {
    /// The value differs, and may not be changed.
    #[error("invalid kernel flag: {name}, expected value: {expected}, actual value: {actual}")]
    Wrong {
        /// Name of the tunable, as sysctl has it.
        name: &'static str,
        /// The value that the kubelet requires.
        expected: i64,
        /// The value of the machine.
        actual: i64,
    },
    /// The file below `/proc/sys` cannot be read or written.
    #[error("kernel flag {name} cannot be read or set")]
    File {
        /// Name of the tunable, as sysctl has it.
        name: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Formats errors as `k8s.io/apimachinery/pkg/util/errors: aggregate` does.
fn aggregate(errors: &[TunableError]) -> String {
    let texts: Vec<String> = errors.iter().map(|e| error_chain(e)).collect();
    if texts.len() == 1 { texts.concat() } else { format!("[{}]", texts.join(", ")) }
}

/// A property of the machine that an event of the Node reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineWarning {
    /// Reason of the event.
    pub reason: &'static str,
    /// Message of the event.
    pub message: &'static str,
}

const CGROUP_V1: MachineWarning = MachineWarning {
    reason: "CgroupV1",
    message: "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. Please migrate to cgroup \
              v2. More information at https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1",
};

const SWAPPED_TMPFS: MachineWarning = MachineWarning {
    reason: "PossibleMemoryBackedVolumesOnDisk",
    message: "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) might be swapped to \
              disk and should no longer be considered secure.",
};

/// The machine, as its files show it.
#[derive(Debug, Clone, Copy)]
pub struct Machine<'a> {
    /// Parent of `proc`: `/`, except in tests.
    pub root: &'a Path,
    /// cgroup v2 is in use.
    pub cgroup_v2: bool,
    /// A tmpfs can be mounted such that its content is not swapped to disk.
    pub tmpfs_noswap: fn() -> bool,
}

impl Machine<'_> {
    /// Checks the machine, and sets kernel tunables if the rules say so. Returns the warnings for events of
    /// the Node.
    ///
    /// # Errors
    /// The machine does not fulfil a rule.
    pub fn check(&self, rules: MachineRules) -> Result<Vec<MachineWarning>, MachineError> {
        let mut warnings = Vec::new();
        if !self.cgroup_v2 {
            if rules.fail_cgroup_v1 {
                return Err(MachineError::CgroupV1);
            }
            if rules.limited_swap {
                return Err(MachineError::LimitedSwap);
            }
            warnings.push(CGROUP_V1);
        }
        if self.has_swap()? {
            if rules.fail_swap_on {
                return Err(MachineError::SwapOn);
            }
            if !(self.tmpfs_noswap)() {
                warnings.push(SWAPPED_TMPFS);
            }
        }
        let tunables = TUNABLES.iter().filter_map(|(name, want)| self.tunable(rules, name, *want).err());
        let wrong: Vec<_> = tunables.collect();
        if wrong.is_empty() { Ok(warnings) } else { Err(MachineError::Tunables { wrong }) }
    }

    /// Returns whether this process runs in a user namespace: its IDs are not those of the machine
    /// (`github.com/moby/sys/userns`).
    fn is_in_user_namespace(&self) -> bool {
        let map = std::fs::read_to_string(self.root.join("proc/self/uid_map")).unwrap_or_default();
        let ids: Vec<&str> = map.split_whitespace().collect();
        !ids.is_empty() && ids != ["0", "0", "4294967295"]
    }

    /// Returns whether the machine swaps: `/proc/swaps` has a line after its header.
    fn has_swap(&self) -> Result<bool, MachineError> {
        let path = self.root.join("proc/swaps");
        match std::fs::read_to_string(&path) {
            Ok(swaps) => Ok(swaps.trim().lines().count() > 1),
            // The kernel has no swap.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(MachineError::Swaps { path, source }),
        }
    }

    fn tunable(&self, rules: MachineRules, name: &'static str, expected: i64) -> Result<(), TunableError> {
        let path = self.root.join("proc/sys").join(name);
        let failed = |source| TunableError::File { name, source };
        let read = std::fs::read_to_string(&path).and_then(|text| {
            text.trim().parse::<i64>().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
        });
        let actual = match read {
            Ok(actual) if actual == expected => return Ok(()),
            Ok(actual) => actual,
            Err(source) if rules.protect_kernel_defaults || rules.set_kernel_tunables => {
                return Err(failed(source));
            }
            Err(_) => return Ok(()),
        };
        if rules.protect_kernel_defaults {
            return Err(TunableError::Wrong { name, expected, actual });
        }
        if rules.set_kernel_tunables {
            tracing::info!(name, expected, actual, "setting kernel tunable");
            return match std::fs::write(&path, expected.to_string()) {
                Err(error) if rules.tolerates_user_namespace && self.is_in_user_namespace() => {
                    tracing::info!(name, %error, "kernel tunable cannot be set in a user namespace");
                    Ok(())
                }
                set => set.map_err(failed),
            };
        }
        tracing::info!(name, expected, actual, "kernel tunable differs from the value that pods rely on");
        Ok(())
    }
}

/// Returns whether this process may mount a tmpfs whose content is not swapped to disk: since Linux 6.4,
/// outside of user namespaces.
#[must_use]
pub fn has_tmpfs_noswap() -> bool {
    use std::os::fd::AsFd as _;
    // Nothing is mounted: the kernel checks an option when it is given.
    rustix::mount::fsopen("tmpfs", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC)
        .and_then(|context| rustix::mount::fsconfig_set_flag(context.as_fd(), "noswap"))
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWAPS: &str = "Filename\tType\tSize\tUsed\tPriority\n";

    struct Root(tempfile::TempDir);

    impl Root {
        /// Makes the files of a machine without swap and with the right tunables.
        fn new() -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            for (name, value) in TUNABLES {
                root.write(&format!("proc/sys/{name}"), &format!("{value}\n"));
            }
            root.write("proc/swaps", SWAPS);
            root
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn read(&self, tunable: &str) -> String {
            std::fs::read_to_string(self.0.path().join("proc/sys").join(tunable)).unwrap()
        }

        fn check(&self, rules: MachineRules, cgroup_v2: bool, noswap: bool) -> Result<Vec<&str>, String> {
            let tmpfs_noswap = if noswap { || true } else { || false };
            let warnings = Machine { root: self.0.path(), cgroup_v2, tmpfs_noswap }.check(rules);
            warnings.map(|w| w.iter().map(|w| w.reason).collect()).map_err(|e| error_chain(&e))
        }
    }

    const NONE: MachineRules = MachineRules {
        fail_swap_on: false,
        fail_cgroup_v1: false,
        limited_swap: false,
        protect_kernel_defaults: false,
        set_kernel_tunables: false,
        tolerates_user_namespace: false,
    };

    #[test]
    fn a_machine_that_swaps_is_refused_unless_that_is_allowed() {
        let root = Root::new();
        let strict = MachineRules { fail_swap_on: true, ..NONE };
        assert_eq!(root.check(strict, true, false), Ok(vec![]));
        root.write("proc/swaps", &format!("{SWAPS}/dev/vda2 partition 1024 0 -2\n"));
        assert_eq!(
            root.check(strict, true, true).unwrap_err(),
            "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false"
        );
        assert_eq!(root.check(NONE, true, true), Ok(vec![]));
        assert_eq!(root.check(NONE, true, false), Ok(vec!["PossibleMemoryBackedVolumesOnDisk"]));
        std::fs::remove_file(root.0.path().join("proc/swaps")).unwrap();
        assert_eq!(root.check(strict, true, false), Ok(vec![]), "a kernel without swap has no such file");
    }

    #[test]
    fn cgroup_v1_is_refused_unless_it_is_allowed() {
        let root = Root::new();
        let strict = MachineRules { fail_cgroup_v1: true, ..NONE };
        assert_eq!(
            root.check(strict, false, true).unwrap_err(),
            "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed in a future release"
        );
        assert_eq!(root.check(strict, true, true), Ok(vec![]));
        assert_eq!(root.check(NONE, false, true), Ok(vec!["CgroupV1"]));
        let swap = MachineRules { limited_swap: true, ..NONE };
        assert_eq!(
            root.check(swap, false, true).unwrap_err(),
            "swap feature is enabled and LimitedSwap but it is only supported with cgroupv2"
        );
        assert_eq!(root.check(swap, true, true), Ok(vec![]));
    }

    #[test]
    fn wrong_kernel_tunables_are_left_or_set_or_refused() {
        let root = Root::new();
        let set = MachineRules { set_kernel_tunables: true, ..NONE };
        let protect = MachineRules { protect_kernel_defaults: true, ..set };
        assert_eq!(root.check(protect, true, true), Ok(vec![]));
        root.write("proc/sys/vm/overcommit_memory", "0\n");
        assert_eq!(
            root.check(protect, true, true).unwrap_err(),
            "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0"
        );
        root.write("proc/sys/kernel/panic", "0\n");
        assert_eq!(
            root.check(protect, true, true).unwrap_err(),
            "[invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0, \
             invalid kernel flag: kernel/panic, expected value: 10, actual value: 0]"
        );
        assert_eq!(root.check(NONE, true, true), Ok(vec![]));
        assert_eq!(root.read("kernel/panic"), "0\n", "left as it is");
        assert_eq!(root.check(set, true, true), Ok(vec![]));
        assert_eq!((root.read("kernel/panic"), root.read("vm/overcommit_memory")), ("10".into(), "1".into()));
        std::fs::remove_file(root.0.path().join("proc/sys/kernel/panic")).unwrap();
        assert_eq!(root.check(NONE, true, true), Ok(vec![]));
        let error = root.check(set, true, true).unwrap_err();
        assert!(error.starts_with("kernel flag kernel/panic cannot be read or set: "), "{error}");
    }

    #[test]
    fn a_tunable_that_cannot_be_set_is_no_error_in_a_user_namespace_with_the_feature_gate() {
        let root = Root::new();
        let panic = root.0.path().join("proc/sys/kernel/panic");
        std::fs::remove_file(&panic).unwrap();
        // Read-only, also for root.
        std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", panic).unwrap();
        let gate = |tolerates_user_namespace| MachineRules {
            set_kernel_tunables: true,
            tolerates_user_namespace,
            ..NONE
        };
        for (map, is_namespace) in
            [("         0          0 4294967295\n", false), ("0 100000 65536\n", true), ("", false)]
        {
            root.write("proc/self/uid_map", map);
            for tolerates in [false, true] {
                let checked = root.check(gate(tolerates), true, true);
                assert_eq!(checked.is_ok(), is_namespace && tolerates, "{map:?}: {checked:?}");
            }
        }
        root.write("proc/sys/vm/panic_on_oom", "1\n");
        root.write("proc/self/uid_map", "0 1000 1\n");
        assert_eq!(root.check(gate(true), true, true), Ok(vec![]));
        assert_eq!(root.read("vm/panic_on_oom"), "0", "the others are set");
    }
}
