//! Selects the devices of a container (`pkg/kubelet/cm/devicemanager: devicesToAllocate`).

use crate::device::{DeviceId, DeviceIds};

/// Free healthy devices of a resource, by their distance to the NUMA nodes that the pod was given
/// (`filterByAffinity`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceGroups {
    /// Devices on a NUMA node of the pod.
    pub aligned: DeviceIds,
    /// Devices on other NUMA nodes.
    pub unaligned: DeviceIds,
    /// Devices without a NUMA node; all devices if the pod has no NUMA nodes.
    pub without_affinity: DeviceIds,
}

impl DeviceGroups {
    /// Returns the groups for a pod without NUMA nodes.
    #[must_use]
    pub fn without_hint(available: DeviceIds) -> Self {
        Self { without_affinity: available, ..Self::default() }
    }

    fn all(&self) -> DeviceIds {
        let groups = [&self.aligned, &self.unaligned, &self.without_affinity];
        groups.into_iter().flatten().cloned().collect()
    }
}

/// The preference of the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preference<'a> {
    /// The plugin does not implement GetPreferredAllocation.
    None,
    /// GetPreferredAllocation was not called yet.
    Open,
    /// The answer of the plugin. Devices that may not be selected are ignored.
    Known(&'a DeviceIds),
}

/// A call of GetPreferredAllocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreferenceQuery {
    /// Devices that the plugin may choose from.
    pub available: DeviceIds,
    /// Devices that the container gets in any case.
    pub must_include: DeviceIds,
    /// Number of devices of the container.
    pub size: usize,
}

/// The next thing to do for the devices of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SelectDecision {
    /// The container gets these devices.
    Selected(DeviceIds),
    /// The preference of the plugin decides: call the plugin, and select again with its answer.
    Query(PreferenceQuery),
}

/// The number of free devices does not suffice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceShortage {
    /// Number of devices that are needed besides the reusable ones.
    pub requested: usize,
    /// Number of free devices.
    pub available: usize,
}

/// Selects `required` devices. Those that an earlier init container leaves are first, then devices that are
/// aligned, then those that the plugin prefers. Where none of these decides, the lowest IDs are selected, so
/// that the result does not depend on chance.
///
/// # Errors
/// Returns the number of free devices if they do not suffice.
pub fn select(
    required: usize,
    reusable: &DeviceIds,
    groups: &DeviceGroups,
    preference: Preference<'_>,
) -> Result<SelectDecision, DeviceShortage> {
    let mut selected = DeviceIds::new();
    if take(&mut selected, required, reusable) {
        return Ok(SelectDecision::Selected(selected));
    }
    let all = groups.all();
    let needed = required.saturating_sub(selected.len());
    if all.difference(&selected).count() < needed {
        return Err(DeviceShortage { requested: needed, available: all.len() });
    }
    let candidates = if needed < groups.aligned.len() {
        &groups.aligned
    } else {
        if take(&mut selected, required, &groups.aligned) {
            return Ok(SelectDecision::Selected(selected));
        }
        &all
    };
    match preference {
        Preference::None => {}
        Preference::Open => {
            return Ok(SelectDecision::Query(PreferenceQuery {
                available: candidates.union(&selected).cloned().collect(),
                must_include: selected,
                size: required,
            }));
        }
        Preference::Known(preferred) => {
            if take(&mut selected, required, preferred.intersection(candidates)) {
                return Ok(SelectDecision::Selected(selected));
            }
        }
    }
    // Enough devices are free, so one of these has the last one.
    for group in [&groups.aligned, &groups.unaligned, &groups.without_affinity] {
        if take(&mut selected, required, group) {
            break;
        }
    }
    Ok(SelectDecision::Selected(selected))
}

/// Moves devices into the selection until it is complete. Returns whether it is.
fn take<'a>(
    selected: &mut DeviceIds,
    required: usize,
    devices: impl IntoIterator<Item = &'a DeviceId>,
) -> bool {
    for device in devices {
        if selected.len() >= required {
            break;
        }
        selected.insert(device.clone());
    }
    selected.len() >= required
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(names: &str) -> DeviceIds {
        names.split_whitespace().map(DeviceId::from).collect()
    }

    fn groups(aligned: &str, unaligned: &str, without_affinity: &str) -> DeviceGroups {
        let (aligned, unaligned) = (ids(aligned), ids(unaligned));
        DeviceGroups { aligned, unaligned, without_affinity: ids(without_affinity) }
    }

    fn selected(names: &str) -> Result<SelectDecision, DeviceShortage> {
        Ok(SelectDecision::Selected(ids(names)))
    }

    #[test]
    fn reusable_then_aligned_then_preferred_devices_are_selected() {
        // Required, reusable, groups, preferred (- for a plugin without preferences), selected.
        let table = [
            (1, "", groups("", "", "a b"), "-", "a"),
            (2, "", groups("", "", "a b"), "-", "a b"),
            (1, "", groups("", "", "a b"), "b", "b"),
            // A preference for a device that is not free is ignored.
            (1, "", groups("", "", "a b"), "z", "a"),
            (2, "", groups("", "", "a b c"), "c z", "a c"),
            (1, "r", groups("", "", "a b"), "b", "r"),
            (2, "r", groups("", "", "a b"), "b", "b r"),
            (2, "r s t", groups("", "", "a"), "-", "r s"),
            // More aligned devices than needed: the plugin chooses among them only.
            (1, "", groups("m n", "a", "b"), "a", "m"),
            (1, "", groups("m n", "a", "b"), "n", "n"),
            // Not enough aligned devices: all of them, and the plugin chooses the rest.
            (3, "", groups("m n", "a b", "c"), "b", "b m n"),
            (3, "", groups("m n", "a b", "c"), "c", "c m n"),
            (3, "", groups("m n", "b", "a"), "-", "b m n"),
            (2, "", groups("m n", "a", ""), "a", "m n"),
            (4, "", groups("m", "x", "a b"), "-", "a b m x"),
        ];
        for (required, reusable, groups, preferred, expected) in table {
            let known = ids(preferred);
            let preference = if preferred == "-" { Preference::None } else { Preference::Known(&known) };
            let got = select(required, &ids(reusable), &groups, preference);
            assert_eq!(got, selected(expected), "{required} of {reusable:?} {groups:?}, {preferred}");
        }
    }

    #[test]
    fn the_plugin_is_called_only_where_its_preference_can_decide() {
        let query = |required, reusable: &str, groups: &DeviceGroups| {
            select(required, &ids(reusable), groups, Preference::Open)
        };
        let expected = |available: &str, must_include: &str, size| {
            let (available, must_include) = (ids(available), ids(must_include));
            Ok(SelectDecision::Query(PreferenceQuery { available, must_include, size }))
        };
        assert_eq!(query(1, "", &groups("", "", "a b")), expected("a b", "", 1));
        assert_eq!(query(2, "r", &groups("", "", "a b")), expected("a b r", "r", 2));
        assert_eq!(query(1, "", &groups("m n", "a", "")), expected("m n", "", 1));
        assert_eq!(query(2, "", &groups("m", "a", "b")), expected("a b m", "m", 2));
        assert_eq!(query(1, "r", &groups("", "", "a")), selected("r"));
        assert_eq!(query(2, "", &groups("m n", "a", "")), selected("m n"));
    }

    #[test]
    fn too_few_devices_are_reported_without_the_reusable_ones() {
        let shortage = |requested, available| Err(DeviceShortage { requested, available });
        assert_eq!(select(3, &ids(""), &groups("", "a", "b"), Preference::None), shortage(3, 2));
        assert_eq!(select(3, &ids("r"), &groups("", "", "a"), Preference::Open), shortage(2, 1));
        assert_eq!(select(1, &ids(""), &groups("", "", ""), Preference::None), shortage(1, 0));
    }

    // The obvious way: each device gets a rank, and the best ones are selected.
    fn slow(
        required: usize,
        reusable: &DeviceIds,
        groups: &DeviceGroups,
        preferred: &DeviceIds,
    ) -> DeviceIds {
        let needed = required - reusable.len().min(required);
        let only_aligned = needed < groups.aligned.len();
        let rank = |id: &DeviceId| match (groups.aligned.contains(id), preferred.contains(id)) {
            _ if reusable.contains(id) => 0,
            (true, true) if only_aligned => 1,
            (true, _) => 2,
            (false, true) if !only_aligned => 3,
            (false, _) if groups.unaligned.contains(id) => 4,
            (false, _) => 5,
        };
        let mut all: Vec<DeviceId> = reusable.union(&groups.all()).cloned().collect();
        all.sort_by_key(|id| (rank(id), id.clone()));
        all.into_iter().take(required).collect()
    }

    proptest! {
        #[test]
        fn the_selection_is_that_of_a_slow_obvious_one(
            required in 1_usize..6,
            kinds in prop::collection::vec((0_u8..5, any::<bool>()), 0..10),
        ) {
            let mut groups = DeviceGroups::default();
            let (mut reusable, mut preferred) = (DeviceIds::new(), DeviceIds::new());
            for (number, (kind, is_preferred)) in kinds.into_iter().enumerate() {
                let id = DeviceId::from(format!("d{number}"));
                if is_preferred {
                    preferred.insert(id.clone());
                }
                match kind {
                    0 => reusable.insert(id),
                    1 => groups.aligned.insert(id),
                    2 => groups.unaligned.insert(id),
                    3 => groups.without_affinity.insert(id),
                    // Not available.
                    _ => false,
                };
            }
            let free = groups.all().len();
            let got = select(required, &reusable, &groups, Preference::Known(&preferred));
            if free + reusable.len() < required {
                let requested = required - reusable.len();
                prop_assert_eq!(got, Err(DeviceShortage { requested, available: free }));
            } else {
                let expected = slow(required, &reusable, &groups, &preferred);
                prop_assert_eq!(got, Ok(SelectDecision::Selected(expected)));
            }
        }
    }
}
