//! The registered plugins of drivers, which one is called, and when the ResourceSlices of a driver are due
//! for removal. No I/O.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time that a driver has to return before its ResourceSlices are removed (`defaultWipingDelay`).
pub const WIPE_DELAY: Duration = Duration::from_secs(30);
/// Version of the calls of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallVersion {
    /// `v1`.
    V1,
    /// `v1beta1`.
    V1beta1,
}

/// Version of the health of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HealthVersion {
    /// `v1`.
    V1,
    /// `v1alpha1`.
    V1alpha1,
}

/// Names of the supported services, the preferred one first.
const CALLS: [(&str, CallVersion); 2] =
    [("v1.DRAPlugin", CallVersion::V1), ("v1beta1.DRAPlugin", CallVersion::V1beta1)];
const HEALTH: [(&str, HealthVersion); 2] =
    [("v1.DRAResourceHealth", HealthVersion::V1), ("v1alpha1.DRAResourceHealth", HealthVersion::V1alpha1)];

/// The services of a plugin that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PluginServices {
    /// Version of the calls.
    pub calls: CallVersion,
    /// Version of the health of devices, if the plugin names one.
    pub health: Option<HealthVersion>,
}

/// Selects the services of a plugin from those that it names at registration.
///
/// # Errors
/// Returns the kubelet's reason if no version is supported (`validateSupportedServices`).
pub(crate) fn select_services(named: &[String]) -> Result<PluginServices, String> {
    if named.is_empty() {
        return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
    }
    let is_named = |service: &str| named.iter().any(|name| name == service);
    let Some((_, calls)) = CALLS.into_iter().find(|(name, _)| is_named(name)) else {
        let quote = |names: &mut dyn Iterator<Item = &str>| {
            names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" ")
        };
        return Err(format!(
            "none of services supported by the plugin ([{}]) are supported by the kubelet ([{}])",
            quote(&mut named.iter().map(String::as_str)),
            quote(&mut CALLS.iter().map(|(name, _)| *name))
        ));
    };
    let health = HEALTH.into_iter().find(|(name, _)| is_named(name)).map(|(_, version)| version);
    Ok(PluginServices { calls, health })
}

/// Number of a registration. A later one has a larger number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PluginNumber(u64);

#[derive(Debug)]
struct ListedPlugin {
    number: PluginNumber,
    endpoint: PathBuf,
    // A process listens at the endpoint.
    is_connected: bool,
}

/// The registered plugins by driver. During an update a driver has two.
#[derive(Debug)]
pub struct PluginList {
    drivers: BTreeMap<String, Vec<ListedPlugin>>,
    // CLOCK_BOOTTIME at which the ResourceSlices of a driver without a connected plugin are removed.
    wipes: BTreeMap<String, Duration>,
    delay: Duration,
    last_number: u64,
}

impl PluginList {
    /// Returns an empty list. The ResourceSlices of a driver are due for removal when it has had no connected
    /// plugin for `delay`.
    #[must_use]
    pub fn new(delay: Duration) -> Self {
        Self { drivers: BTreeMap::new(), wipes: BTreeMap::new(), delay, last_number: 0 }
    }

    /// Adds a plugin that is not connected yet.
    ///
    /// # Errors
    /// A plugin of the driver has registered with this endpoint.
    pub fn add(&mut self, driver: &str, endpoint: &Path, now: Duration) -> Result<PluginNumber, String> {
        let plugins = self.drivers.entry(driver.to_owned()).or_default();
        if plugins.iter().any(|plugin| plugin.endpoint == endpoint) {
            let endpoint = endpoint.display();
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
        }
        self.last_number = self.last_number.saturating_add(1);
        let number = PluginNumber(self.last_number);
        plugins.push(ListedPlugin { number, endpoint: endpoint.to_owned(), is_connected: false });
        self.update_wipe(driver, now);
        Ok(number)
    }

    /// Removes a plugin. Returns its number.
    pub fn remove(&mut self, driver: &str, endpoint: &Path, now: Duration) -> Option<PluginNumber> {
        let plugins = self.drivers.get_mut(driver)?;
        let index = plugins.iter().position(|plugin| plugin.endpoint == endpoint)?;
        let removed = plugins.remove(index);
        if plugins.is_empty() {
            self.drivers.remove(driver);
        }
        self.update_wipe(driver, now);
        Some(removed.number)
    }

    /// Sets whether a process listens at the endpoint of a plugin.
    pub fn set_connected(&mut self, driver: &str, number: PluginNumber, is_connected: bool, now: Duration) {
        let plugins = self.drivers.get_mut(driver).into_iter().flatten();
        for plugin in plugins.filter(|plugin| plugin.number == number) {
            plugin.is_connected = is_connected;
        }
        self.update_wipe(driver, now);
    }

    /// Returns the plugin to call: the latest that is connected, or else the latest.
    #[must_use]
    pub fn pick(&self, driver: &str) -> Option<PluginNumber> {
        let plugins = self.drivers.get(driver)?;
        let connected = plugins.iter().rev().find(|plugin| plugin.is_connected);
        connected.or(plugins.last()).map(|plugin| plugin.number)
    }

    /// Returns the endpoints of a driver, the latest last, and whether each one is connected.
    pub fn endpoints(&self, driver: &str) -> impl Iterator<Item = (&Path, bool)> {
        let plugins = self.drivers.get(driver).into_iter().flatten();
        plugins.map(|plugin| (plugin.endpoint.as_path(), plugin.is_connected))
    }

    /// Returns the names of the drivers with a plugin.
    pub fn drivers(&self) -> impl Iterator<Item = &str> {
        self.drivers.keys().map(String::as_str)
    }

    /// Returns the time of the next removal of ResourceSlices.
    #[must_use]
    pub fn next_wipe(&self) -> Option<Duration> {
        self.wipes.values().min().copied()
    }

    /// Takes a driver whose ResourceSlices are due for removal.
    pub fn take_due_wipe(&mut self, now: Duration) -> Option<String> {
        let (driver, _) = self.wipes.iter().find(|(_, due)| **due <= now)?;
        let driver = driver.clone();
        self.wipes.remove(&driver);
        Some(driver)
    }

    /// Schedules another attempt to remove the ResourceSlices of a driver, unless it is usable again.
    pub fn retry_wipe(&mut self, driver: &str, due: Duration) {
        if !self.is_usable(driver) {
            self.wipes.entry(driver.to_owned()).or_insert(due);
        }
    }

    fn is_usable(&self, driver: &str) -> bool {
        self.drivers.get(driver).is_some_and(|plugins| plugins.iter().any(|plugin| plugin.is_connected))
    }

    // A removal that is pending keeps its time (`sync`).
    fn update_wipe(&mut self, driver: &str, now: Duration) {
        if self.is_usable(driver) {
            self.wipes.remove(driver);
        } else {
            self.wipes.entry(driver.to_owned()).or_insert(now.saturating_add(self.delay));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(30);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn named(services: &str) -> Vec<String> {
        services.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_latest_supported_version_is_selected() {
        let table = [
            ("v1.DRAPlugin", CallVersion::V1, None),
            ("v1beta1.DRAPlugin", CallVersion::V1beta1, None),
            ("v1beta1.DRAPlugin v1.DRAPlugin", CallVersion::V1, None),
            ("v1alpha4.Node v1.DRAPlugin", CallVersion::V1, None),
            ("v1.DRAPlugin v1.DRAResourceHealth", CallVersion::V1, Some(HealthVersion::V1)),
            (
                "v1beta1.DRAPlugin v1alpha1.DRAResourceHealth",
                CallVersion::V1beta1,
                Some(HealthVersion::V1alpha1),
            ),
            (
                "v1alpha1.DRAResourceHealth v1.DRAResourceHealth v1.DRAPlugin",
                CallVersion::V1,
                Some(HealthVersion::V1),
            ),
        ];
        for (services, calls, health) in table {
            assert_eq!(select_services(&named(services)), Ok(PluginServices { calls, health }), "{services}");
        }
        let empty = "empty list of supported gRPC services (aka supported versions)";
        assert_eq!(select_services(&[]), Err(empty.to_owned()));
        let none = r#"none of services supported by the plugin (["v1alpha3.Node" "v2.DRAPlugin"]) are supported by the kubelet (["v1.DRAPlugin" "v1beta1.DRAPlugin"])"#;
        assert_eq!(select_services(&named("v1alpha3.Node v2.DRAPlugin")), Err(none.to_owned()));
    }

    #[test]
    fn the_latest_connected_plugin_is_called_or_else_the_latest() {
        let mut list = PluginList::new(DELAY);
        assert_eq!(list.pick("d"), None);
        let old = list.add("d", Path::new("/old"), at(0)).unwrap();
        assert_eq!(list.pick("d"), Some(old));
        let new = list.add("d", Path::new("/new"), at(0)).unwrap();
        assert_eq!(list.pick("d"), Some(new));
        list.set_connected("d", old, true, at(0));
        assert_eq!(list.pick("d"), Some(old));
        list.set_connected("d", new, true, at(0));
        assert_eq!(list.pick("d"), Some(new));
        let text = "endpoint /new already registered for DRA driver plugin d";
        assert_eq!(list.add("d", Path::new("/new"), at(0)), Err(text.to_owned()));
        assert_eq!(list.remove("d", Path::new("/new"), at(0)), Some(new));
        assert_eq!(list.pick("d"), Some(old));
        assert_eq!(list.remove("d", Path::new("/new"), at(0)), None);
        assert_eq!(list.remove("other", Path::new("/old"), at(0)), None);
        assert_eq!(list.remove("d", Path::new("/old"), at(0)), Some(old));
        assert_eq!((list.pick("d"), list.drivers().count()), (None, 0));
    }

    #[test]
    fn slices_are_due_when_a_driver_stays_away_and_not_when_it_returns() {
        let mut list = PluginList::new(DELAY);
        let first = list.add("d", Path::new("/a"), at(0)).unwrap();
        assert_eq!(list.next_wipe(), Some(at(30)));
        list.set_connected("d", first, true, at(1));
        assert_eq!(list.next_wipe(), None);
        list.set_connected("d", first, false, at(10));
        assert_eq!(list.next_wipe(), Some(at(40)));
        // The removal does not prolong the delay.
        list.remove("d", Path::new("/a"), at(20));
        assert_eq!((list.next_wipe(), list.take_due_wipe(at(39))), (Some(at(40)), None));
        let second = list.add("d", Path::new("/b"), at(39)).unwrap();
        list.set_connected("d", second, true, at(39));
        assert_eq!(list.take_due_wipe(at(100)), None);
        list.set_connected("d", second, false, at(100));
        assert_eq!(list.take_due_wipe(at(130)), Some("d".to_owned()));
        assert_eq!(list.next_wipe(), None);
        list.retry_wipe("d", at(131));
        assert_eq!(list.next_wipe(), Some(at(131)));
        list.set_connected("d", second, true, at(131));
        list.retry_wipe("d", at(132));
        assert_eq!(list.next_wipe(), None);
    }

    #[test]
    fn a_late_report_of_a_removed_plugin_changes_nothing() {
        let mut list = PluginList::new(DELAY);
        let first = list.add("d", Path::new("/a"), at(0)).unwrap();
        list.remove("d", Path::new("/a"), at(0));
        list.set_connected("d", first, true, at(1));
        assert_eq!((list.pick("d"), list.next_wipe()), (None, Some(at(30))));
    }
}
