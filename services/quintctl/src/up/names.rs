//! The names of the services, and their order.

/// The node API, which runs only with an API server.
pub(super) const NODE_API: &str = "node-api";

/// The binaries of the five services, in start order.
pub(super) const SERVICES: [&str; 5] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// The service whose instances share the pods.
pub(super) const PROBER: &str = "probe-service";

/// The processes of the instances of probe-service. Their number is the bound of `--probe-instances`.
pub(super) const PROBERS: [&str; 8] = [
    PROBER,
    "probe-service-1",
    "probe-service-2",
    "probe-service-3",
    "probe-service-4",
    "probe-service-5",
    "probe-service-6",
    "probe-service-7",
];

/// Returns the service of a process.
pub(super) fn service_of(process: &'static str) -> &'static str {
    if PROBERS.contains(&process) { PROBER } else { process }
}

/// Returns the ID of an instance of probe-service; none for another process.
pub(super) fn prober_id(process: &str) -> Option<String> {
    let number = PROBERS.iter().position(|prober| *prober == process)?;
    Some(format!("probe-{number}"))
}

/// Returns whether a row of the health overview is about a process. A row of an instance has its ID behind
/// the name of the service. If `processes` has one instance of probe-service, all instances belong to it,
/// also those that another process supervises.
pub(super) fn is_row_of(process: &str, row: &str, processes: &[&str]) -> bool {
    let mut words = row.split(' ');
    let service = words.next();
    match prober_id(process) {
        Some(id) if processes.contains(&PROBERS[1]) => {
            service == Some(PROBER) && words.next() == Some(id.as_str())
        }
        Some(_) | None => service == Some(process),
    }
}

/// The service that owns the pods: it stops first, and only it drains.
pub(super) const POD_SYNC: &str = "pod-sync";

/// Groups of services that stop one after the other. Callers stop before the services that they call.
pub(super) const STOP_ORDER: [&[&str]; 3] =
    [&[POD_SYNC, NODE_API], &["status-reporter", "probe-service", "pleg-service"], &["cri-proxy"]];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_an_instance_belongs_to_its_process_only() {
        let several = &["cri-proxy", PROBERS[0], PROBERS[1]];
        let rows = ["probe-service probe-0", "probe-service probe-1", "cri-proxy", "probe-service"];
        let owned = |process: &str, processes: &[&str]| rows.map(|row| is_row_of(process, row, processes));
        assert_eq!(owned("probe-service", several), [true, false, false, false]);
        assert_eq!(owned("probe-service-1", several), [false, true, false, false]);
        assert_eq!(owned("cri-proxy", several), [false, false, true, false]);
        assert_eq!(owned("probe-service", &["cri-proxy", PROBER]), [true, true, false, true]);
    }
}
