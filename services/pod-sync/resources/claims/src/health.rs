//! The health of devices as drivers report it (`pkg/kubelet/cm/dra: healthInfoCache`). No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceHealth;
use quintlet_plugin_api::dra_health::v1 as api;

use crate::inventory::PreparedDevice;

/// Time after which the health of a device is unknown, unless the driver sets another one
/// (`DefaultHealthTimeout`).
const TIMEOUT: Duration = Duration::from_secs(30);
/// Longest message in a status, in bytes (`ResourceHealthMessageMaxLength`).
const LONGEST_MESSAGE: usize = 1024;
/// End of a message that is cut.
const CUT: &str = "...";
/// Largest number of devices of a driver.
const MOST_DEVICES: usize = 1 << 14;

/// The health of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HealthState {
    /// The device works.
    Healthy,
    /// The driver reports a problem.
    Unhealthy,
    /// The driver does not know, or has not reported in time.
    Unknown,
}

impl HealthState {
    /// Returns the value in the status of a pod.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Healthy => "Healthy",
            Self::Unhealthy => "Unhealthy",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<api::HealthStatus> for HealthState {
    fn from(status: api::HealthStatus) -> Self {
        match status {
            api::HealthStatus::Healthy => Self::Healthy,
            api::HealthStatus::Unhealthy => Self::Unhealthy,
            api::HealthStatus::Unknown => Self::Unknown,
        }
    }
}

/// Pool and name of a device.
pub(crate) type DeviceName = (String, String);

#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceHealth {
    state: HealthState,
    message: String,
    timeout: Duration,
    // CLOCK_BOOTTIME at which the health becomes unknown.
    until: Duration,
}

/// The health of the devices of one plugin, as of its last report.
#[derive(Debug, Default)]
pub(crate) struct PluginHealth {
    devices: BTreeMap<DeviceName, DeviceHealth>,
}

impl PluginHealth {
    /// Takes over a report. Returns the devices whose health, message or timeout changed. Devices that are
    /// not in the report keep their health until its timeout.
    pub(crate) fn update(&mut self, report: Vec<api::DeviceHealth>, now: Duration) -> BTreeSet<DeviceName> {
        let mut changed = self.expire(now);
        for device in report.into_iter().take(MOST_DEVICES) {
            let state = HealthState::from(device.health());
            let api::DeviceIdentifier { pool_name, device_name } = device.device.unwrap_or_default();
            let name = (pool_name, device_name);
            let timeout = u64::try_from(device.health_check_timeout_seconds).unwrap_or_default();
            let timeout = if timeout == 0 { TIMEOUT } else { Duration::from_secs(timeout) };
            let until = now.saturating_add(timeout);
            let health = DeviceHealth { state, message: cut(device.message), timeout, until };
            let known = self.devices.get(&name);
            let is_same = known.is_some_and(|known| {
                (known.state, &known.message, known.timeout) == (state, &health.message, timeout)
            });
            if !is_same {
                changed.insert(name.clone());
            }
            if known.is_some() || self.devices.len() < MOST_DEVICES {
                self.devices.insert(name, health);
            }
        }
        changed
    }

    /// Removes the health of devices whose timeout is over. Returns those whose health was known.
    pub(crate) fn expire(&mut self, now: Duration) -> BTreeSet<DeviceName> {
        let expired: Vec<_> = self.devices.extract_if(.., |_, health| health.until < now).collect();
        let was_known = |(_, health): &(DeviceName, DeviceHealth)| health.state != HealthState::Unknown;
        expired.into_iter().filter(was_known).map(|(name, _)| name).collect()
    }

    /// Returns the time after which the next device expires.
    #[must_use]
    pub(crate) fn next_expiry(&self) -> Option<Duration> {
        self.devices.values().map(|health| health.until).min()
    }

    /// Returns the names of all devices.
    #[must_use]
    pub(crate) fn names(&self) -> BTreeSet<DeviceName> {
        self.devices.keys().cloned().collect()
    }

    /// Returns the health of a device, and the driver's message.
    #[must_use]
    pub(crate) fn of(&self, pool: &str, device: &str, now: Duration) -> (HealthState, Option<&str>) {
        let name = (pool.to_owned(), device.to_owned());
        match self.devices.get(&name).filter(|health| now <= health.until) {
            Some(health) => {
                (health.state, Some(health.message.as_str()).filter(|message| !message.is_empty()))
            }
            None => (HealthState::Unknown, None),
        }
    }
}

/// Cuts a message to the longest that the API server accepts.
fn cut(message: String) -> String {
    if message.len() <= LONGEST_MESSAGE {
        return message;
    }
    let end = message.floor_char_boundary(LONGEST_MESSAGE.saturating_sub(CUT.len()));
    let mut message = message;
    message.truncate(end);
    message.push_str(CUT);
    message
}

/// Returns the entry of a device in the status of a container.
#[must_use]
pub(crate) fn resource_health(
    driver: &str,
    device: &PreparedDevice,
    state: HealthState,
    message: Option<&str>,
) -> ResourceHealth {
    let named = || format!("{driver}/{}/{}", device.pool, device.device);
    ResourceHealth {
        health: Some(state.name().to_owned()),
        message: message.map(str::to_owned),
        resource_id: device.cdi.first().cloned().unwrap_or_else(named),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn report(device: &str, status: api::HealthStatus, timeout: i64, message: &str) -> api::DeviceHealth {
        let device = api::DeviceIdentifier { pool_name: "p".to_owned(), device_name: device.to_owned() };
        api::DeviceHealth {
            device: Some(device),
            health: status.into(),
            last_updated_time: 0,
            health_check_timeout_seconds: timeout,
            message: message.to_owned(),
        }
    }

    fn names(devices: &BTreeSet<DeviceName>) -> String {
        devices.iter().map(|(_, device)| device.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn changes_are_returned_and_a_repeated_report_prolongs_the_health() {
        use api::HealthStatus::{Healthy, Unhealthy};
        let mut health = PluginHealth::default();
        let changed =
            health.update(vec![report("a", Healthy, 0, ""), report("b", Unhealthy, 0, "hot")], at(0));
        assert_eq!(names(&changed), "a b");
        assert_eq!(health.of("p", "b", at(30)), (HealthState::Unhealthy, Some("hot")));
        assert_eq!(health.of("p", "c", at(0)), (HealthState::Unknown, None));
        let again =
            health.update(vec![report("a", Healthy, 0, ""), report("b", Unhealthy, 0, "hot")], at(20));
        assert_eq!(names(&again), "");
        assert_eq!(health.of("p", "a", at(50)), (HealthState::Healthy, None));
        assert_eq!(health.of("p", "a", at(51)), (HealthState::Unknown, None));
        let table = [("warm", 0, "b"), ("warm", 0, ""), ("warm", -3, ""), ("warm", 5, "b")];
        for (message, timeout, expected) in table {
            let changed = health.update(vec![report("b", Unhealthy, timeout, message)], at(21));
            assert_eq!(names(&changed), expected, "{message} {timeout}");
        }
    }

    #[test]
    fn a_device_that_is_no_longer_reported_becomes_unknown_at_its_timeout() {
        use api::HealthStatus::{Healthy, Unknown};
        let mut health = PluginHealth::default();
        health.update(
            vec![report("a", Healthy, 5, ""), report("b", Healthy, 100, ""), report("c", Unknown, 5, "")],
            at(0),
        );
        assert_eq!(health.next_expiry(), Some(at(5)));
        assert_eq!(names(&health.expire(at(5))), "");
        assert_eq!(names(&health.update(vec![report("b", Healthy, 100, "")], at(6))), "a");
        assert_eq!((names(&health.names()), health.next_expiry()), ("b".to_owned(), Some(at(106))));
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        assert_eq!(cut("x".repeat(1024)).len(), 1024);
        assert_eq!(cut("x".repeat(1025)), format!("{}...", "x".repeat(1021)));
        assert_eq!(cut("é".repeat(600)), format!("{}...", "é".repeat(510)));
    }

    #[test]
    fn a_resource_is_identified_by_its_first_cdi_device_or_its_names() {
        let mut device = PreparedDevice {
            pool: "p".to_owned(),
            device: "d".to_owned(),
            cdi: vec!["a.com/d=1".to_owned(), "a.com/d=2".to_owned()],
            ..PreparedDevice::default()
        };
        let entry = resource_health("a.com", &device, HealthState::Unhealthy, Some("hot"));
        assert_eq!((entry.resource_id.as_str(), entry.health.as_deref()), ("a.com/d=1", Some("Unhealthy")));
        assert_eq!(entry.message.as_deref(), Some("hot"));
        device.cdi.clear();
        assert_eq!(resource_health("a.com", &device, HealthState::Unknown, None).resource_id, "a.com/p/d");
    }
}
