//! The command line of pod-sync.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{ArgAction, Parser};
use pod_sync_images::pulls::PullSettings;
use pod_sync_node_decisions::image_access::{Allowlist, VerificationPolicy};
use pod_sync_node_decisions::image_gc::ImageGcPolicy;
use pod_sync_node_decisions::shutdown::{PriorityGracePeriod, ShutdownPlan};
use pod_sync_placement::PlacementArgs;
use quintlet_config::ConfigArgs;
use quintlet_kit::args::{CommonArgs, NodeArgs, SubscriberArgs};
use quintlet_kit::own_limits::OwnLimits;

use pod_sync_shutdown::SystemBus;

pub use crate::certificate_args::CertificateArgs;
pub use crate::eviction_args::EvictionArgs;
pub use crate::machine_args::{DiskArgs, MachineArgs};
pub use crate::offline_args::OfflineArgs;
pub use crate::resource_args::ResourceArgs;

/// Runs the desired pods of the node and computes their status.
///
/// pod-sync reads pods from a manifest directory, a URL and an API server, and runs them through cri-proxy.
/// It owns the root directory: a second pod-sync with the same directory does not start.
#[derive(Debug, Clone, Parser)]
#[command(name = "pod-sync", version)]
pub struct Args {
    /// Arguments of every service.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Path of the configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Users that may subscribe.
    #[command(flatten)]
    pub subscribers: SubscriberArgs,
    /// User, by name or number, that may call this service besides root and the user of this process: that of
    /// the node API. May be given more than once.
    #[arg(long, value_name = "USER", value_parser = quintlet_kit::args::user_id)]
    pub allow_uid: Vec<u32>,
    /// The kubelet's root directory: pods, volumes, checkpoints.
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub root_dir: PathBuf,
    /// Root directory of the machine's SELinux policy and of `/sys/fs/selinux`. Not an argument: only tests
    /// set another one.
    #[arg(skip = PathBuf::from("/"))]
    pub selinux_root: PathBuf,
    /// Directory (or one file) of pod manifests: YAML or JSON, with ConfigMaps and Secrets among them.
    #[arg(long, alias = "pod-manifest-path", value_name = "PATH")]
    pub manifests: Option<PathBuf>,
    /// Interval between reads of the manifests without a change notification.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub file_check_frequency: Duration,
    /// URL of a pod or a list of pods.
    #[arg(long, value_name = "URL")]
    pub manifest_url: Option<String>,
    /// Header of requests to that URL, `Name: value`; may be given more than once.
    #[arg(long, value_name = "HEADER", value_parser = header)]
    pub manifest_url_header: Vec<(String, String)>,
    /// Interval between requests to that URL.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub http_check_frequency: Duration,
    /// Name of the node and the kubeconfig.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Certificates of the node.
    #[command(flatten)]
    pub certificates: CertificateArgs,
    /// Starts without the API server.
    #[command(flatten)]
    pub offline: OfflineArgs,
    /// Address of the node, or one per family; each must be on an interface. 0.0.0.0 or :: selects the family
    /// that comes first. Default: the address of the node's name, else of the interface with the default
    /// route.
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    pub node_ip: Vec<IpAddr>,
    /// Pod CIDRs that the runtime gets on a node without an API server. With an API server, the Node has
    /// them.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CIDR")]
    pub pod_cidr: String,
    /// Port of the node API, published in the Node; 0 if there is none.
    #[arg(long, alias = "port", value_name = "PORT", default_value_t = 10250)]
    pub node_api_port: u16,
    /// Label of the node, `key=value`; may be given more than once.
    #[arg(long, alias = "node-labels", value_name = "LABEL", value_delimiter = ',', value_parser = quintlet_config::pair)]
    pub node_label: Vec<(String, String)>,
    /// Parent cgroup of `kubepods`.
    #[arg(long, default_value = "/", value_name = "CGROUP")]
    pub cgroup_root: String,
    /// Cgroup driver, if the runtime does not report one.
    #[arg(long, value_enum, default_value_t, value_name = "DRIVER")]
    pub cgroup_driver: CgroupDriver,
    /// Directory of pod logs.
    #[arg(long, default_value = "/var/log/pods", value_name = "DIR")]
    pub pod_logs_dir: PathBuf,
    /// Directory of links to container logs, for log collectors. Empty: no links.
    #[arg(long, default_value = "/var/log/containers", value_name = "DIR")]
    pub container_logs_dir: String,
    /// Size from which a container log is rotated, e.g. 10Mi. Negative: never.
    #[arg(long, default_value = "10Mi", value_parser = size, value_name = "QUANTITY", allow_hyphen_values = true)]
    pub container_log_max_size: i64,
    /// Maximum number of files of a container log, including the current one; at least 2.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..), value_name = "N")]
    pub container_log_max_files: u32,
    /// Maximum number of concurrent log rotations; at least 1.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub container_log_max_workers: u32,
    /// Interval between checks of log sizes; at least 3s.
    #[arg(long, default_value = "10s", value_parser = monitor_interval, value_name = "DURATION")]
    pub container_log_monitor_interval: Duration,
    /// Cluster domain, for DNS search lists. Empty: none.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "DOMAIN")]
    pub cluster_domain: String,
    /// Address of the cluster DNS server; may be given more than once.
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    pub cluster_dns: Vec<String>,
    /// resolv.conf for pods with DNS policy Default. Empty: none.
    #[arg(long, default_value = "/etc/resolv.conf", value_name = "FILE")]
    pub resolv_conf: String,
    /// Interval between syncs of an unchanged pod, plus jitter of up to half of it.
    #[arg(long, default_value = "1m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub sync_frequency: Duration,
    /// A controller attaches volumes to the node. False: only volumes that need no attachment are mounted.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub enable_controller_attach_detach: bool,
    /// Detection of changed ConfigMaps and Secrets: a watch per object, a cache with the time to live that
    /// the Node says, or a request per use.
    #[arg(long, value_enum, default_value = "Watch", value_name = "STRATEGY")]
    pub config_map_and_secret_change_detection_strategy: pod_sync_objects::ChangeDetectionStrategy,
    /// Unsafe sysctls that pods may set; a trailing `*` matches any suffix.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Sysctl of all pods, `name=value`; may be given more than once. Needs the feature gate
    /// DefaultPodSysctls.
    #[arg(long, value_parser = quintlet_config::pair, value_name = "SYSCTL")]
    pub default_pod_sysctls: Vec<(String, String)>,
    /// How images are pulled.
    #[command(flatten)]
    pub pulls: PullArgs,
    /// Settings of the graceful node shutdown.
    #[command(flatten)]
    pub shutdown: ShutdownArgs,
    /// Settings of image garbage collection.
    #[command(flatten)]
    pub images: ImageArgs,
    /// Settings of pods and their resources.
    #[command(flatten)]
    pub resources: ResourceArgs,
    /// CPUs, memory and NUMA nodes of containers.
    #[command(flatten)]
    pub placement: PlacementArgs,
    /// Thresholds of evictions.
    #[command(flatten)]
    pub eviction: EvictionArgs,
    /// Requirements on the machine.
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Places of the machine's disks.
    #[command(flatten)]
    pub disks: DiskArgs,
    /// Directories, configuration files and telemetry.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Settings of this process.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "This process")]
pub struct ProcessArgs {
    /// Score of this process for the kernel's choice of a process to kill; -1000 excludes the process.
    #[arg(long, default_value_t = -999, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1000..=1000), value_name = "SCORE")]
    pub oom_score_adj: i32,
    /// Limit of the process's open files.
    #[arg(long, default_value_t = 1_000_000, value_name = "COUNT")]
    pub max_open_files: u64,
    /// Log of the kernel. The process sets it; a test in memory has none.
    #[arg(skip)]
    pub kernel_log: Option<PathBuf>,
}

impl ProcessArgs {
    pub(crate) fn limits(&self) -> OwnLimits {
        OwnLimits { oom_score_adj: self.oom_score_adj, open_files: Some(self.max_open_files) }
    }
}

/// Settings of the graceful node shutdown, which is disabled by default.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Shutdown of the machine")]
pub struct ShutdownArgs {
    /// Time that a shutdown waits for pods to terminate. 0s: disabled.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub shutdown_grace_period: Duration,
    /// Part of that time, at its end, that is reserved for critical pods.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub shutdown_grace_period_critical_pods: Duration,
    /// Instead of both: seconds for pods of this priority or higher, `1000=30`; may be given more than once.
    #[arg(long, value_delimiter = ',', value_parser = share, allow_hyphen_values = true, value_name = "PRIORITY=SECONDS")]
    pub shutdown_grace_period_by_pod_priority: Vec<PriorityGracePeriod>,
    /// D-Bus address of logind. Default: the system bus.
    #[arg(long, value_name = "ADDRESS")]
    pub system_bus: Option<String>,
    /// Directory of logind drop-in files, for a longer InhibitDelayMaxSec.
    #[arg(long, default_value = "/etc/systemd/logind.conf.d", value_name = "DIR")]
    pub logind_drop_ins: PathBuf,
}

impl ShutdownArgs {
    /// Returns the grace period of each priority.
    ///
    /// # Errors
    /// The settings contradict each other.
    pub fn plan(&self) -> anyhow::Result<ShutdownPlan> {
        let (total, critical) = (self.shutdown_grace_period, self.shutdown_grace_period_critical_pods);
        anyhow::ensure!(critical <= total, "shutdownGracePeriodCriticalPods is above shutdownGracePeriod");
        if self.shutdown_grace_period_by_pod_priority.is_empty() {
            return Ok(ShutdownPlan::from_total(total, critical));
        }
        anyhow::ensure!(
            total.is_zero(),
            "shutdownGracePeriodByPodPriority excludes shutdownGracePeriod and shutdownGracePeriodCriticalPods"
        );
        Ok(ShutdownPlan::from_priorities(self.shutdown_grace_period_by_pod_priority.clone()))
    }

    /// Returns the connection to logind.
    #[must_use]
    pub fn login(&self) -> SystemBus {
        SystemBus { address: self.system_bus.clone(), drop_ins: self.logind_drop_ins.clone() }
    }
}

/// When unused images are removed.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Image garbage collection")]
pub struct ImageArgs {
    /// Disk usage in percent from which images are removed. 100: never.
    #[arg(long, default_value_t = 85, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_high_threshold: u8,
    /// Disk usage in percent at which the removal stops.
    #[arg(long, default_value_t = 80, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_low_threshold: u8,
    /// Minimum age of an image before it may be removed.
    #[arg(long, default_value = "2m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub minimum_image_ttl_duration: Duration,
    /// Time without use after which an image is removed, whatever the disk usage. 0s: never.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub image_maximum_gc_age: Duration,
}

impl ImageArgs {
    /// Returns the policy of image garbage collection.
    #[must_use]
    pub fn policy(&self) -> ImageGcPolicy {
        ImageGcPolicy {
            high: self.image_gc_high_threshold,
            low: self.image_gc_low_threshold,
            min_age: self.minimum_image_ttl_duration,
            max_age: self.image_maximum_gc_age,
        }
    }
}

/// The process that creates cgroups (`cgroupDriver`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CgroupDriver {
    /// Directories, created by pod-sync and the runtime.
    #[default]
    Cgroupfs,
    /// Slices, created by systemd.
    Systemd,
}

/// How images are pulled. Default: 4 concurrent pulls per registry, 8 in total, without a rate limit.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Image pulls")]
pub struct PullArgs {
    /// Pull one image at a time.
    #[arg(long, value_name = "BOOL")]
    pub serialize_image_pulls: Option<bool>,
    /// Maximum number of concurrent pulls.
    #[arg(long, value_name = "PULLS")]
    pub max_parallel_image_pulls: Option<usize>,
    /// Maximum number of pulls started per second; further pulls fail. 0: no limit.
    #[arg(long, value_name = "PULLS")]
    pub registry_qps: Option<u32>,
    /// Burst of pulls, if a rate is set. Default: 10.
    #[arg(long, value_name = "PULLS")]
    pub registry_burst: Option<u32>,
    /// Verification of existing images: a pod must have credentials for them, or pull them again.
    #[arg(long, value_enum, default_value = "NeverVerifyPreloadedImages", value_name = "POLICY")]
    pub image_pull_credentials_verification_policy: Verification,
    /// Image for which NeverVerifyAllowlistedImages requires no credentials: its name with registry and
    /// without tag, or `registry/path/*`; may be given more than once.
    #[arg(long, value_delimiter = ',', value_name = "IMAGE")]
    pub preloaded_images_verification_allowlist: Vec<String>,
    /// Configuration of exec credential providers (CredentialProviderConfig).
    #[arg(long = "image-credential-provider-config", value_name = "FILE", requires = "provider_bin_dir")]
    pub provider_config: Option<PathBuf>,
    /// Directory of the programs of exec credential providers.
    #[arg(long = "image-credential-provider-bin-dir", value_name = "DIR", requires = "provider_config")]
    pub provider_bin_dir: Option<PathBuf>,
}

/// `imagePullCredentialsVerificationPolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum Verification {
    /// No image is verified.
    NeverVerify,
    /// Images that pod-sync pulled are verified.
    #[default]
    NeverVerifyPreloadedImages,
    /// Images that are not on the allowlist are verified.
    NeverVerifyAllowlistedImages,
    /// Every image is verified.
    AlwaysVerify,
}

impl PullArgs {
    /// Returns the images whose use is verified.
    ///
    /// # Errors
    /// An entry of the allowlist is malformed, or there is an allowlist that the policy does not read.
    pub fn verification(&self) -> anyhow::Result<VerificationPolicy> {
        let list = &self.preloaded_images_verification_allowlist;
        let listed =
            self.image_pull_credentials_verification_policy == Verification::NeverVerifyAllowlistedImages;
        anyhow::ensure!(
            listed || list.is_empty(),
            "preloadedImagesVerificationAllowlist: needs imagePullCredentialsVerificationPolicy NeverVerifyAllowlistedImages"
        );
        Ok(match self.image_pull_credentials_verification_policy {
            Verification::NeverVerify => VerificationPolicy::NeverVerify,
            Verification::NeverVerifyPreloadedImages => VerificationPolicy::NeverVerifyPreloadedImages,
            Verification::NeverVerifyAllowlistedImages => {
                let list = Allowlist::parse(list).context("preloadedImagesVerificationAllowlist")?;
                VerificationPolicy::NeverVerifyAllowlistedImages(list)
            }
            Verification::AlwaysVerify => VerificationPolicy::AlwaysVerify,
        })
    }

    /// Returns the limits of pulls.
    #[must_use]
    pub fn settings(&self) -> PullSettings {
        PullSettings {
            serialize: self.serialize_image_pulls,
            max_parallel: self.max_parallel_image_pulls,
            qps: self.registry_qps,
            burst: self.registry_burst,
        }
    }
}

impl Args {
    /// Returns the labels of the node.
    #[must_use]
    pub fn labels(&self) -> BTreeMap<String, String> {
        self.node_label.iter().cloned().collect()
    }

    /// Returns how container logs are rotated.
    #[must_use]
    pub fn container_logs(&self) -> pod_sync_logs::LogSettings {
        pod_sync_logs::LogSettings {
            container_log_max_size: self.container_log_max_size,
            container_log_max_files: index(self.container_log_max_files),
            container_log_max_workers: index(self.container_log_max_workers),
            container_log_monitor_interval: self.container_log_monitor_interval,
        }
    }
}

fn share(text: &str) -> Result<PriorityGracePeriod, String> {
    let (priority, seconds) = text.split_once('=').ok_or("want PRIORITY=SECONDS")?;
    let number = |e: std::num::ParseIntError| format!("{e}, want PRIORITY=SECONDS");
    Ok(PriorityGracePeriod {
        priority: priority.parse().map_err(number)?,
        seconds: seconds.parse().map_err(number)?,
    })
}

/// Converts to `usize`, which has at least 32 bits on all supported platforms.
fn index(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn size(text: &str) -> Result<i64, String> {
    quintlet_model::quantity::Quantity::parse(text).map(|q| q.value()).map_err(|e| e.to_string())
}

/// Shortest interval that the kubelet allows (`pkg/kubelet/apis/config/validation`).
const LEAST_MONITOR_INTERVAL: Duration = Duration::from_secs(3);

fn monitor_interval(text: &str) -> Result<Duration, String> {
    let interval = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    if interval < LEAST_MONITOR_INTERVAL { Err("want at least 3s".to_owned()) } else { Ok(interval) }
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("want `Name: value`")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_holds_together() {
        Args::command().debug_assert();
        let problems = quintlet_testkit::command_line::differences(
            &Args::command(),
            quintlet_config::table::Service::PodSync,
        );
        assert_eq!(problems, [""; 0], "the table of fields and the flags differ");
        let args =
            Args::try_parse_from(["pod-sync", "--sync-frequency", "5s", "--node-label", "a=b"]).unwrap();
        assert_eq!((args.sync_frequency, args.labels().len()), (Duration::from_secs(5), 1));
        let logs =
            |line: &[&str]| Args::try_parse_from([&["pod-sync"], line].concat()).unwrap().container_logs();
        assert_eq!(logs(&[]).container_log_max_size, 10 << 20);
        assert_eq!(logs(&["--container-log-max-size", "-1"]).container_log_max_size, -1);
        for bad in [
            ["--container-log-max-size", "ten"],
            ["--container-log-max-files", "1"],
            ["--container-log-max-workers", "0"],
            ["--container-log-monitor-interval", "2s"],
            ["--sync-frequency", "5"],
            ["--node-label", "x"],
            ["--node-ip", "nine"],
            ["--manifest-url-header", "x"],
        ] {
            assert!(Args::try_parse_from(["pod-sync", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_label_that_no_node_may_have_is_reported_at_the_start() {
        let read = |label: &str| {
            let line = ["pod-sync", "--node-labels", label].map(Into::into).to_vec();
            quintlet_config::read::<Args>(quintlet_config::table::Service::PodSync, line)
        };
        assert_eq!(read("node.kubernetes.io/pool=a").unwrap().args.labels().len(), 1);
        for bad in ["kubernetes.io/pool=a", "pool=a b"] {
            assert!(matches!(read(bad), Err(quintlet_config::Exit::Invalid(_))), "{bad}");
        }
    }

    #[test]
    fn the_name_of_the_node_is_taken_as_the_kubelet_takes_it() {
        let name = |given: &str| {
            Args::try_parse_from(["pod-sync", "--hostname-override", given]).map(|a| a.node.node_name)
        };
        assert_eq!(name(" Node1 ").unwrap().as_deref(), Some("node1"));
        assert!(name(" ").is_err());
    }
}
