//! Manages slices through systemd's D-Bus interface, as the kubelet does
//! (`github.com/opencontainers/cgroups/systemd`).

use futures::StreamExt as _;
use quintlet_model::cpu_list::CpuList;
use quintlet_model::qos::{self, PodCgroup};
use zbus::{Connection, OwnedObjectPath, Variant};

use crate::error::{CgroupError, LIMIT, SystemdError};

/// systemd rounds CPU time to hundredths of a CPU (10 ms per second).
const QUOTA_STEP_US: u64 = 10_000;
/// No limit, in properties of systemd.
const INFINITY: u64 = u64::MAX;
const ALLOWED_CPUS: &str = "AllowedCPUs";
const QUOTA_PERIOD: &str = "CPUQuotaPeriodUSec";
/// Versions of systemd from which on it has a property. An older one refuses all properties of the call.
const SINCE: [(&str, u32); 2] = [(QUOTA_PERIOD, 242), (ALLOWED_CPUS, 244)];
#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait Manager {
    fn subscribe(&self) -> zbus::Result<()>;

    fn start_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn set_unit_properties(
        &self,
        name: &str,
        runtime: bool,
        properties: &[(&str, Variant<'_>)],
    ) -> zbus::Result<()>;

    // Not cached: the cache would read all properties.
    #[zbus(property(emits_changed_signal = "false"))]
    fn version(&self) -> zbus::Result<String>;

    #[zbus(signal)]
    fn job_removed(&self, id: u32, job: OwnedObjectPath, unit: String, result: String);
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Number(u64),
    /// A bit for each CPU, lowest first.
    Mask(Vec<u8>),
}

impl From<&Value> for Variant<'static> {
    fn from(value: &Value) -> Self {
        match value {
            Value::Number(number) => Variant::from(*number),
            Value::Mask(bytes) => Variant::from(bytes.clone()),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Action<'a> {
    Start,
    Stop,
    Set(&'a [(&'static str, Value)]),
}

impl Action<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Set(_) => "set properties of",
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Systemd {
    // Address of the system bus; `None` for the default.
    address: Option<String>,
    unified: bool,
}

impl Systemd {
    pub(super) fn new(address: Option<String>, unified: bool) -> Self {
        Self { address, unified }
    }

    /// Starts a slice and its parents. A running slice is not changed.
    pub(super) fn start(&self, unit: &str) -> Result<(), CgroupError> {
        self.run(Action::Start, unit)
    }

    /// Stops a slice without processes.
    pub(super) fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        self.run(Action::Stop, unit)
    }

    /// Sets the limits of a slice until it stops.
    pub(super) fn set(&self, unit: &str, values: &PodCgroup) -> Result<(), CgroupError> {
        let properties = properties(values, self.unified);
        if properties.is_empty() { Ok(()) } else { self.run(Action::Set(&properties), unit) }
    }

    /// Connects for each call: a slice changes a few times per pod, and a connection that is kept would have
    /// to be renewed.
    fn run(&self, action: Action<'_>, unit: &str) -> Result<(), CgroupError> {
        let work = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let call = async { tokio::time::timeout(LIMIT, self.call(action, unit)).await };
            let done = runtime.map_err(SystemdError::Runtime)?.block_on(call);
            done.unwrap_or(Err(SystemdError::Timeout))
        };
        // The caller may be a thread of a runtime, which cannot block on another one.
        let done = std::thread::scope(|scope| scope.spawn(work).join());
        let done = done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        done.map_err(|source| CgroupError::Systemd { what: action.name(), unit: unit.to_owned(), source })
    }

    async fn call(&self, action: Action<'_>, unit: &str) -> Result<(), SystemdError> {
        let manager = ManagerProxy::new(&self.connect().await?).await?;
        // Subscribed before the job starts, so that its end is not missed.
        let mut removed = manager.receive_job_removed().await?;
        let job = match action {
            Action::Set(properties) => {
                let needs =
                    |name: &str| SINCE.iter().find(|(n, _)| *n == name).map_or(0, |(_, since)| *since);
                let oldest = properties.iter().map(|(name, _)| needs(name)).max().unwrap_or(0);
                let version = if oldest > 0 { major(&manager.version().await?) } else { 0 };
                let known = properties.iter().filter(|(name, _)| needs(name) <= version);
                let properties: Vec<_> = known.map(|(name, v)| (*name, Variant::from(v))).collect();
                if properties.is_empty() {
                    return Ok(());
                }
                return Ok(manager.set_unit_properties(unit, true, &properties).await?);
            }
            Action::Start => {
                manager.subscribe().await?;
                manager.start_unit(unit, "replace").await?
            }
            Action::Stop => {
                manager.subscribe().await?;
                manager.stop_unit(unit, "replace").await?
            }
        };
        while let Some(signal) = removed.next().await {
            let signal = signal.args()?;
            if signal.job == job {
                return match signal.result.as_str() {
                    "done" => Ok(()),
                    result => Err(SystemdError::Job(result.to_owned())),
                };
            }
        }
        Err(SystemdError::Closed)
    }

    async fn connect(&self) -> zbus::Result<Connection> {
        let builder = match &self.address {
            Some(address) => zbus::connection::Builder::address(address.as_str()),
            None => zbus::connection::Builder::system(),
        };
        builder.build().await
    }
}

/// Returns the number of a version such as `257.9-1~deb13u1` or `v245.4`; 0 if there is none.
fn major(version: &str) -> u32 {
    let version = version.strip_prefix('v').unwrap_or(version);
    let end = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version.get(..end).and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

fn mask(cpus: &CpuList) -> Vec<u8> {
    let byte = |cpu: u32| usize::try_from(cpu / 8).unwrap_or(usize::MAX);
    let bytes = cpus.iter().next_back().map_or(0, |last| byte(last).saturating_add(1));
    let mut mask = vec![0_u8; bytes];
    for cpu in cpus.iter() {
        if let Some(byte) = mask.get_mut(byte(cpu)) {
            *byte |= 1_u8.wrapping_shl(cpu % 8);
        }
    }
    mask
}

fn properties(values: &PodCgroup, unified: bool) -> Vec<(&'static str, Value)> {
    let limit = |value: i64| u64::try_from(value).unwrap_or(INFINITY);
    let shares = values.cpu_shares.map(|shares| {
        if unified { ("CPUWeight", qos::shares_to_weight(shares)) } else { ("CPUShares", shares) }
    });
    let memory =
        values.memory_bytes.map(|bytes| (if unified { "MemoryMax" } else { "MemoryLimit" }, limit(bytes)));
    let quota = values.cpu_quota_us.map(|quota| {
        let period = values.cpu_period_us.unwrap_or(qos::DEFAULT_PERIOD_US).max(1);
        let per_second = match u64::try_from(quota) {
            Err(_) | Ok(0) => INFINITY,
            Ok(quota) => {
                let exact = quota.saturating_mul(1_000_000).checked_div(period).unwrap_or(INFINITY);
                exact.div_ceil(QUOTA_STEP_US).saturating_mul(QUOTA_STEP_US)
            }
        };
        ("CPUQuotaPerSecUSec", per_second)
    });
    let period = values.cpu_period_us.map(|us| (QUOTA_PERIOD, us));
    let tasks = values.pids.map(|pids| ("TasksMax", limit(pids)));
    let protected = [("MemoryMin", values.memory_min), ("MemoryLow", values.memory_low)]
        .map(|(name, bytes)| Some((name, limit(bytes.filter(|_| unified)?))));
    let cpus = values.cpus.as_ref().map(|cpus| (ALLOWED_CPUS, Value::Mask(mask(cpus))));
    let numbers = [shares, quota, period, memory, tasks].into_iter().chain(protected).flatten();
    numbers.map(|(name, number)| (name, Value::Number(number))).chain(cpus).collect()
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::systemd::FakeSystemd;

    use super::*;

    fn numbers(values: &PodCgroup, unified: bool) -> Vec<(&'static str, u64)> {
        let number = |(name, value)| match value {
            Value::Number(number) => (name, number),
            Value::Mask(mask) => panic!("{name}: {mask:?}"),
        };
        properties(values, unified).into_iter().map(number).collect()
    }

    #[test]
    fn limits_are_properties_with_the_names_of_each_version() {
        let values = PodCgroup {
            cpu_shares: Some(1024),
            cpu_quota_us: Some(50_001),
            cpu_period_us: Some(100_000),
            memory_bytes: Some(1 << 20),
            pids: Some(7),
            ..PodCgroup::default()
        };
        let common = [("CPUQuotaPerSecUSec", 510_000), ("CPUQuotaPeriodUSec", 100_000)];
        let [v1, v2] = [false, true].map(|unified| numbers(&values, unified));
        let tasks = ("TasksMax", 7);
        assert_eq!(v1, [("CPUShares", 1024), common[0], common[1], ("MemoryLimit", 1 << 20), tasks]);
        assert_eq!(v2, [("CPUWeight", 39), common[0], common[1], ("MemoryMax", 1 << 20), tasks]);
        let protected = PodCgroup { memory_min: Some(7), memory_low: Some(0), ..PodCgroup::default() };
        assert_eq!(numbers(&protected, true), [("MemoryMin", 7), ("MemoryLow", 0)]);
        assert!(properties(&protected, false).is_empty(), "v1 has no protection");
        let unlimited = PodCgroup { cpu_quota_us: Some(-1), memory_bytes: Some(-1), ..PodCgroup::default() };
        assert_eq!(numbers(&unlimited, true), [("CPUQuotaPerSecUSec", INFINITY), ("MemoryMax", INFINITY)]);
        assert!(properties(&PodCgroup::default(), true).is_empty());
        let cpus = |list: &str| {
            let values = PodCgroup { cpus: Some(CpuList::parse(list).unwrap()), ..PodCgroup::default() };
            assert_eq!(properties(&values, false), properties(&values, true));
            properties(&values, true)
        };
        assert_eq!(cpus("0-1"), [("AllowedCPUs", Value::Mask(vec![0b11]))]);
        assert_eq!(cpus("1,7-9,23"), [("AllowedCPUs", Value::Mask(vec![0b1000_0010, 0b11, 0b1000_0000]))]);
    }

    #[test]
    fn a_version_of_systemd_has_its_number_first() {
        for (version, want) in
            [("257.9-1~deb13u1", 257), ("v245.4-1.fc32", 245), ("239", 239), ("", 0), ("v", 0), ("x1", 0)]
        {
            assert_eq!(major(version), want, "{version:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn slices_are_started_limited_and_stopped_and_errors_of_systemd_are_returned() {
        let dir = tempfile::tempdir().unwrap();
        let fake = FakeSystemd::start(dir.path()).await;
        let systemd = Systemd::new(Some(fake.address()), true);
        systemd.start("a.slice").unwrap();
        systemd.set("a.slice", &PodCgroup { pids: Some(5), ..PodCgroup::default() }).unwrap();
        systemd.set("a.slice", &PodCgroup::default()).unwrap();
        systemd.stop("a.slice").unwrap();
        assert_eq!(
            fake.calls(),
            ["start a.slice replace", "set a.slice runtime TasksMax=5", "stop a.slice replace"]
        );
        let limits = PodCgroup {
            cpu_quota_us: Some(50_000),
            cpu_period_us: Some(100_000),
            cpus: Some(CpuList::parse("0-8").unwrap()),
            ..PodCgroup::default()
        };
        for (version, want) in [
            ("v239", "CPUQuotaPerSecUSec=500000"),
            ("242", "CPUQuotaPerSecUSec=500000 CPUQuotaPeriodUSec=100000"),
            ("244.1", "CPUQuotaPerSecUSec=500000 CPUQuotaPeriodUSec=100000 AllowedCPUs=[255, 1]"),
        ] {
            fake.set_version(version);
            systemd.set("a.slice", &limits).unwrap();
            assert_eq!(fake.calls().last().unwrap(), &format!("set a.slice runtime {want}"), "{version}");
        }
        let count = fake.calls().len();
        fake.set_version("239");
        systemd.set("a.slice", &PodCgroup { cpus: limits.cpus, ..PodCgroup::default() }).unwrap();
        assert_eq!(fake.calls().len(), count, "no property is left");
        fake.fail_jobs_of("failing.slice");
        let error = systemd.start("failing.slice").unwrap_err().to_string();
        assert_eq!(error, "systemd: start failing.slice: the job ended with the result \"failed\"");
        fake.refuse("unknown.slice");
        let error = systemd.stop("unknown.slice").unwrap_err().to_string();
        assert!(error.ends_with("Unit unknown.slice not loaded."), "{error}");
        drop(fake);
        let error = systemd.start("a.slice").unwrap_err().to_string();
        assert!(error.starts_with("systemd: start a.slice: "), "{error}");
    }
}
