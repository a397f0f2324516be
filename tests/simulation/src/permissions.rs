//! Requests to the API server that the identity of a node may send: the table of docs/helm.md.

use std::collections::BTreeSet;

/// The page with the table.
const PAGE: &str = include_str!("../../../docs/helm.md");
/// Heading of the section with the table.
const HEADING: &str = "### Calls to the API server";

/// Returns the requests that the table lacks, each as `<verb> <resource>[/<subresource>]`.
pub(crate) fn undocumented<'a>(requests: impl Iterator<Item = (&'a str, u64)>) -> Vec<String> {
    let permitted = permitted(PAGE);
    requests.map(|(request, _)| request.to_owned()).filter(|request| !permitted.contains(request)).collect()
}

/// Returns each request of the table. A row has resources and verbs in its first two columns.
fn permitted(page: &str) -> BTreeSet<String> {
    let section = page.split(HEADING).nth(1).expect("the page has the section");
    let table = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = table.take_while(|line| line.starts_with('|')).skip(2);
    let mut permitted = BTreeSet::new();
    for row in rows {
        let mut columns = row.split('|').skip(1).map(names);
        let (resources, verbs) = (columns.next().unwrap_or_default(), columns.next().unwrap_or_default());
        for resource in &resources {
            permitted.extend(verbs.iter().map(|verb| format!("{verb} {resource}")));
        }
    }
    permitted
}

/// Returns the names in backticks.
fn names(column: &str) -> Vec<&str> {
    column.split('`').skip(1).step_by(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_the_table_lacks_is_found() {
        let requests = [("patch pods/status", 3), ("list secrets", 1), ("update pods", 1), ("list jobs", 2)];
        assert_eq!(undocumented(requests.into_iter()), ["update pods", "list jobs"]);
        assert!(permitted(PAGE).len() > 40, "{:?}", permitted(PAGE));
    }
}
