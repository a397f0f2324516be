//! Resources that are reserved for the system and for the node agent, and the cgroups that enforce them
//! (`pkg/kubelet/cm: enforceNodeAllocatableCgroups`).

use pod_sync_decisions::qos::{self, PodCgroup, ResourceList};
use quintlet_model::cpu_list::{CpuList, InvalidCpuList};
use quintlet_model::quantity::{Format, InvalidQuantity, Quantity};

/// Resources that can be reserved. `pid` is not part of the capacity.
pub const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

/// A reservation cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReservationError {
    /// The resource is not one of [`RESERVABLE`].
    #[error("{name} cannot be reserved, want {}", RESERVABLE.join(", "))]
    Resource {
        /// Name of the resource.
        name: String,
    },
    /// The amount is not a quantity.
    #[error("reservation of {resource}: {source}")]
    Amount {
        /// Name of the resource.
        resource: String,
        /// The error of the parser.
        source: InvalidQuantity,
    },
    /// `reservedSystemCPUs` is malformed.
    #[error("unable to parse reserved-cpus list: {list:?} {source}")]
    Cpus {
        /// The list in the configuration.
        list: String,
        /// The error of the parser.
        source: InvalidCpuList,
    },
    /// `reservedSystemCPUs` has a CPU that is not online.
    #[error("reserved-cpus: {reserved} is not a subset of online-cpus: {online}")]
    NotOnline {
        /// The reserved CPUs.
        reserved: CpuList,
        /// The CPUs that are online.
        online: CpuList,
    },
}

/// The fields of the configuration that reserve resources.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReservationFields<'a> {
    /// `systemReserved`.
    pub system: &'a [(String, String)],
    /// `kubeReserved`.
    pub kube: &'a [(String, String)],
    /// `reservedSystemCPUs`; may be empty.
    pub cpus: &'a str,
}

/// `systemReserved` and `kubeReserved`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reservations {
    system: ResourceList,
    kube: ResourceList,
}

/// A cgroup that gets the limits of a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnforcedReservation {
    /// `systemReservedCgroup` or `kubeReservedCgroup`.
    pub cgroup: String,
    /// The limits, which are those of a pod with the reserved amounts.
    pub limits: PodCgroup,
    /// Start of the message if the limits cannot be written.
    pub failure: &'static str,
    /// Start of the message if the limits are written.
    pub success: &'static str,
}

impl Reservations {
    /// Parses the reservations. `cpus` replaces the CPU amounts of both; `online` are the CPUs of the
    /// machine.
    ///
    /// # Errors
    /// A resource cannot be reserved, an amount is malformed, or a CPU is not online.
    pub fn parse(fields: ReservationFields<'_>, online: &CpuList) -> Result<Self, ReservationError> {
        let (mut system, mut kube) = (list(fields.system)?, list(fields.kube)?);
        let reserved = CpuList::parse(fields.cpus)
            .map_err(|source| ReservationError::Cpus { list: fields.cpus.to_owned(), source })?;
        if !reserved.is_subset_of(online) {
            return Err(ReservationError::NotOnline { reserved, online: online.clone() });
        }
        if let Ok(count @ 1..) = i64::try_from(reserved.count()) {
            kube.remove("cpu");
            system.insert("cpu".to_owned(), Quantity::from_units(count, Format::Decimal));
        }
        Ok(Self { system, kube })
    }

    /// Returns the sum of both reservations.
    #[must_use]
    pub fn total(&self) -> ResourceList {
        let mut total = self.system.clone();
        for (name, amount) in &self.kube {
            let sum = total.get(name).copied().unwrap_or_default() + *amount;
            total.insert(name.clone(), sum);
        }
        total
    }

    /// Returns the cgroups to limit. `enforce` is `enforceNodeAllocatable`. With `protects_memory`, the
    /// feature gate MemoryQoS, the reserved memory is protected as well.
    #[must_use]
    pub fn enforced(
        &self,
        enforce: &[String],
        system_cgroup: &str,
        kube_cgroup: &str,
        protects_memory: bool,
    ) -> Vec<EnforcedReservation> {
        let (system, kube) = ((&self.system, system_cgroup), (&self.kube, kube_cgroup));
        let succeeded =
            ["Updated limits on system reserved cgroup", "Updated limits on kube reserved cgroup"];
        [
            ("system-reserved", system, "Failed to enforce System Reserved Cgroup Limits on", succeeded[0]),
            ("kube-reserved", kube, "Failed to enforce Kube Reserved Cgroup Limits on", succeeded[1]),
            (
                "system-reserved-compressible",
                system,
                "Failed to enforce System Reserved Compressible Cgroup Limits on",
                succeeded[0],
            ),
            (
                "kube-reserved-compressible",
                kube,
                "Failed to enforce Kube Reserved Compressible Cgroup Limits on",
                succeeded[1],
            ),
        ]
        .into_iter()
        .filter(|(word, ..)| enforce.iter().any(|e| e == word))
        .map(|(word, (amounts, cgroup), failure, success)| EnforcedReservation {
            cgroup: cgroup.to_owned(),
            limits: limits(amounts, word.ends_with("-compressible"), protects_memory),
            failure,
            success,
        })
        .collect()
    }
}

/// Returns the limits of a cgroup (`pkg/kubelet/cm: getCgroupConfigInternal`).
fn limits(amounts: &ResourceList, is_compressible_only: bool, protects_memory: bool) -> PodCgroup {
    let value = |name: &str| amounts.get(name).filter(|_| !is_compressible_only).map(|q| q.value());
    PodCgroup {
        cpu_shares: amounts.get("cpu").map(|q| qos::milli_to_shares(q.milli_value())),
        memory_bytes: value("memory"),
        memory_min: value("memory").filter(|_| protects_memory),
        pids: value("pid"),
        ..PodCgroup::default()
    }
}

fn list(amounts: &[(String, String)]) -> Result<ResourceList, ReservationError> {
    let mut all = ResourceList::new();
    for (name, amount) in amounts {
        if !RESERVABLE.contains(&name.as_str()) {
            return Err(ReservationError::Resource { name: name.clone() });
        }
        let amount = Quantity::parse(amount)
            .map_err(|source| ReservationError::Amount { resource: name.clone(), source })?;
        all.insert(name.clone(), amount);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        let pair = |part: &str| part.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()));
        text.split_whitespace().filter_map(pair).collect()
    }

    fn parse(system: &str, kube: &str, cpus: &str) -> Result<Reservations, String> {
        let (system, kube) = (pairs(system), pairs(kube));
        let fields = ReservationFields { system: &system, kube: &kube, cpus };
        Reservations::parse(fields, &CpuList::parse("0-3").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn reserved_cpus_replace_the_amounts_of_both_reservations() {
        let shown = |system: &str, kube: &str, cpus: &str| {
            let all = parse(system, kube, cpus)?;
            let cpu = |list: &ResourceList| list.get("cpu").map(|q| q.milli_value());
            Ok::<_, String>((cpu(&all.system), cpu(&all.kube), cpu(&all.total())))
        };
        assert_eq!(shown("cpu=100m", "cpu=150m", ""), Ok((Some(100), Some(150), Some(250))));
        assert_eq!(shown("cpu=100m", "cpu=150m memory=1Gi", "1,3"), Ok((Some(2000), None, Some(2000))));
        assert_eq!(shown("", "", "0"), Ok((Some(1000), None, Some(1000))));
        assert_eq!(
            shown("", "", "3-4").unwrap_err(),
            "reserved-cpus: 3-4 is not a subset of online-cpus: 0-3"
        );
        assert!(shown("", "", "x").unwrap_err().starts_with("unable to parse reserved-cpus list: \"x\""));
        assert_eq!(
            parse("gpu=1", "", "").unwrap_err(),
            "gpu cannot be reserved, want cpu, memory, ephemeral-storage, pid"
        );
        assert!(parse("", "cpu=x", "").unwrap_err().starts_with("reservation of cpu: "));
    }

    #[test]
    fn each_enforced_reservation_limits_its_cgroup() {
        let all =
            parse("cpu=500m memory=1Gi pid=1000", "cpu=250m memory=64Mi ephemeral-storage=1Gi", "").unwrap();
        let enforced = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            all.enforced(&words, "/system.slice", "/kube.slice", false)
                .into_iter()
                .map(|e| {
                    let limits = (e.limits.cpu_shares, e.limits.memory_bytes, e.limits.pids);
                    (e.cgroup, limits, e.failure, e.success)
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(enforced(&["pods"]), []);
        assert_eq!(enforced(&["none"]), []);
        let whole = enforced(&["kube-reserved", "pods", "system-reserved"]);
        assert_eq!(
            whole,
            [
                (
                    "/system.slice".to_owned(),
                    (Some(512), Some(1 << 30), Some(1000)),
                    "Failed to enforce System Reserved Cgroup Limits on",
                    "Updated limits on system reserved cgroup"
                ),
                (
                    "/kube.slice".to_owned(),
                    (Some(256), Some(64 << 20), None),
                    "Failed to enforce Kube Reserved Cgroup Limits on",
                    "Updated limits on kube reserved cgroup"
                ),
            ]
        );
        let protected = all.enforced(&["kube-reserved".to_owned()], "", "/k", true);
        assert_eq!(protected[0].limits.memory_min, Some(64 << 20));
        let shares: Vec<_> = enforced(&["system-reserved-compressible", "kube-reserved-compressible"])
            .into_iter()
            .map(|(cgroup, limits, failure, _)| (cgroup, limits, failure))
            .collect();
        assert_eq!(
            shares,
            [
                (
                    "/system.slice".to_owned(),
                    (Some(512), None, None),
                    "Failed to enforce System Reserved Compressible Cgroup Limits on"
                ),
                (
                    "/kube.slice".to_owned(),
                    (Some(256), None, None),
                    "Failed to enforce Kube Reserved Compressible Cgroup Limits on"
                ),
            ]
        );
    }
}
