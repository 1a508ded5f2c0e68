//! The choice of the group of nodes that serves a model: a pure function of all nodes of one model name.
//!
//! A group is the nodes with equal fingerprints. The one that serves is the group in force (`in_force`). The
//! caller decides again at every change of membership or usability. The caller leaves out pool nodes, and
//! nodes that are refused for another reason (protocol, or not the operator's model). See
//! `docs/decisions/0024-a-rollout-waits-for-a-complete-group.md`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use types::{Epoch, FingerprintDigest, Role};

/// The properties of one node that the decision depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupNode {
    pub(super) fingerprint: FingerprintDigest,
    pub(super) role: Role,
    pub(super) epoch: Epoch,
    pub(super) link: Usability,
}

/// Whether the router can use a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usability {
    Usable,
    /// The router cannot use the node now, but perhaps in a moment: it is connecting to it.
    Possible,
    /// The node drains, so it gets no new work.
    Leaving,
}

/// The inputs of the decision besides the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecisionContext {
    pub(super) in_force: Option<FingerprintDigest>,
    /// Whether the router has just started and may not know all nodes yet.
    pub(super) is_settling: bool,
    /// Whether the decision was postponed for the longest allowed time.
    pub(super) postponed_too_long: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) in_force: Option<FingerprintDigest>,
    pub(super) reason: Reason,
}

/// The reason why a group was chosen to serve, or why the decision is postponed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The group is the only one.
    OnlyGroup,
    /// The group is the only one with a usable node of each required role.
    OnlyComplete,
    MostNodes,
    /// Another group has as many nodes. The chosen one served before, or it is older.
    Tie,
    /// No group has a usable node of each required role; the chosen one has a decode node.
    CanDecode,
    /// No group can serve requests.
    NoneServes,
    /// The router has just started, and nodes may still announce themselves.
    SettlePeriod,
    /// The decision waits, because a larger group, or the serving one, may become usable in a moment.
    Expecting,
}

impl Reason {
    /// Returns whether time alone may change the decision.
    pub(super) fn is_postponed(self) -> bool {
        matches!(self, Self::SettlePeriod | Self::Expecting)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnlyGroup => "all nodes agree",
            Self::OnlyComplete => "the only group with all needed kinds of nodes",
            Self::MostNodes => "the most nodes of the groups that can serve",
            Self::Tie => "a tie in the number of nodes, won by the group in force before or the older one",
            Self::CanDecode => "no group has all needed kinds of nodes, this one has a decode node",
            Self::NoneServes => "no group can serve",
            Self::SettlePeriod => "the router has just started, nodes may still announce themselves",
            Self::Expecting => "waiting for connections to nodes of a larger group or of the one in force",
        })
    }
}

/// The preference for a group: by its number of nodes, then whether it serves now, then by the age of its
/// oldest node.
type GroupRank = (usize, bool, Reverse<u64>);

/// The counts and roles of one group, from which the decision is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupSummary {
    pub(super) fingerprint: FingerprintDigest,
    /// The number of nodes that do not drain.
    pub(super) n_staying: usize,
    usable: RoleSet,
    /// The roles of nodes that are usable or may become usable in a moment.
    possible: RoleSet,
    oldest: Epoch,
}

#[derive(Clone, Copy, Debug, Default)]
struct RoleSet {
    prefills: bool,
    decodes: bool,
}

impl RoleSet {
    fn covers(self, needed: Self) -> bool {
        (self.decodes || !needed.decodes) && (self.prefills || !needed.prefills)
    }

    fn add(&mut self, role: Role) {
        self.prefills |= role.prefills();
        self.decodes |= role.decodes();
    }
}

impl GroupSummary {
    fn preference(&self, in_force: Option<FingerprintDigest>) -> GroupRank {
        (self.n_staying, in_force == Some(self.fingerprint), Reverse(self.oldest.0))
    }

    /// Returns whether a decode node of the group is usable.
    pub(super) fn can_decode(&self) -> bool {
        self.usable.decodes
    }
}

/// Sorts one model's nodes into groups and counts them.
pub(super) fn summarize(nodes: &[GroupNode]) -> Vec<GroupSummary> {
    let mut groups: BTreeMap<FingerprintDigest, GroupSummary> = BTreeMap::new();
    for node in nodes {
        let group = groups.entry(node.fingerprint).or_insert_with(|| GroupSummary {
            fingerprint: node.fingerprint,
            n_staying: 0,
            usable: RoleSet::default(),
            possible: RoleSet::default(),
            oldest: node.epoch,
        });
        group.oldest = group.oldest.min(node.epoch);
        match node.link {
            Usability::Usable => {
                group.usable.add(node.role);
                group.possible.add(node.role);
            }
            Usability::Possible => group.possible.add(node.role),
            Usability::Leaving => continue,
        }
        group.n_staying += 1;
    }
    groups.into_values().collect()
}

/// Returns the role that a group lacks before it can serve; `None` if it can serve.
pub(super) fn missing(nodes: &[GroupNode], group: FingerprintDigest) -> Option<Role> {
    let usable = summarize(nodes)
        .iter()
        .find(|summarize| summarize.fingerprint == group)
        .map(|summarize| summarize.usable);
    let usable = usable.unwrap_or_default();
    if !usable.decodes {
        Some(Role::Decode)
    } else if !usable.covers(needed_roles(nodes)) {
        Some(Role::Prefill)
    } else {
        None
    }
}

/// Returns the roles that a group needs: a prefill node only if the model has prefill nodes.
fn needed_roles(nodes: &[GroupNode]) -> RoleSet {
    let is_prefill = |node: &GroupNode| node.role.prefills() && !node.role.decodes();
    let prefills = nodes.iter().any(|node| node.link != Usability::Leaving && is_prefill(node));
    RoleSet { prefills, decodes: true }
}

/// Chooses the group that serves a model.
///
/// A group that can serve (with a usable node of each required role) is preferred to one that cannot. Among
/// several such groups, the largest wins; on a tie, the serving group, then the older one. If no group can
/// serve, the serving group continues with its decode nodes, which compute prompts themselves. A change is
/// postponed while a better group may become usable.
pub(super) fn decide(nodes: &[GroupNode], known: DecisionContext) -> Decision {
    let DecisionContext { in_force, is_settling, postponed_too_long } = known;
    if in_force.is_none() && is_settling {
        return Decision { in_force: None, reason: Reason::SettlePeriod };
    }
    let (groups, needed) = (summarize(nodes), needed_roles(nodes));
    let Some(best) = best_of(&groups, in_force, |group| group.usable, needed) else {
        let kept = in_force.filter(|digest| groups.iter().any(|group| group.fingerprint == *digest));
        return Decision { in_force: kept, reason: Reason::NoneServes };
    };
    if in_force != Some(best.fingerprint) && !postponed_too_long {
        let expected = best_of(&groups, in_force, |group| group.possible, needed);
        if expected.is_some_and(|expected| expected.fingerprint != best.fingerprint) {
            return Decision { in_force, reason: Reason::Expecting };
        }
    }
    Decision { in_force: Some(best.fingerprint), reason: reason(best, &groups, needed) }
}

/// Returns the best group by the roles that `kinds` returns: the usable ones, or also the possible ones.
fn best_of(
    groups: &[GroupSummary],
    in_force: Option<FingerprintDigest>,
    kinds: fn(&GroupSummary) -> RoleSet,
    needed: RoleSet,
) -> Option<GroupSummary> {
    let complete = groups.iter().filter(|group| kinds(group).covers(needed));
    let decoding = || groups.iter().filter(|group| kinds(group).decodes);
    let kept = || decoding().find(|group| in_force == Some(group.fingerprint));
    let best = complete.max_by_key(|group| group.preference(in_force)).or_else(kept);
    best.or_else(|| decoding().max_by_key(|group| group.preference(in_force))).copied()
}

fn reason(best: GroupSummary, groups: &[GroupSummary], needed: RoleSet) -> Reason {
    let others = || groups.iter().filter(|group| group.fingerprint != best.fingerprint);
    let complete = |group: &GroupSummary| group.usable.covers(needed);
    if others().next().is_none() {
        Reason::OnlyGroup
    } else if !complete(&best) {
        Reason::CanDecode
    } else if !others().any(complete) {
        Reason::OnlyComplete
    } else if others().filter(|group| complete(group)).all(|group| group.n_staying < best.n_staying) {
        Reason::MostNodes
    } else {
        Reason::Tie
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a node: its group, its role (`p`, `d` or `b`oth), and `?` if the router is connecting to it,
    /// `-` if it drains. The position in the list is the node's age.
    fn node((age, word): (usize, &str)) -> GroupNode {
        let mut letters = word.chars();
        let group = letters.next().expect("a group");
        let role = match letters.next() {
            Some('p') => Role::Prefill,
            Some('d') => Role::Decode,
            _ => Role::Both,
        };
        let link = match letters.next() {
            None => Usability::Usable,
            Some('?') => Usability::Possible,
            _ => Usability::Leaving,
        };
        GroupNode { fingerprint: digest(group), role, epoch: Epoch(age as u64), link }
    }

    fn digest(group: char) -> FingerprintDigest {
        FingerprintDigest(u64::from(group))
    }

    fn decided(nodes: &str, in_force: Option<char>, is_settling: bool, postponed_too_long: bool) -> Decision {
        let nodes: Vec<GroupNode> = nodes.split_whitespace().enumerate().map(node).collect();
        let in_force = in_force.map(digest);
        decide(&nodes, DecisionContext { in_force, is_settling, postponed_too_long })
    }

    #[test]
    fn decisions() {
        use Reason::*;
        for (nodes, before, after, why) in [
            ("", None, None, NoneServes),
            ("ap", None, None, NoneServes),
            ("ad", None, Some('a'), OnlyGroup),
            ("ab", None, Some('a'), OnlyGroup),
            ("ap ap ad ad", None, Some('a'), OnlyGroup),
            // Rule: the larger group wins, then the serving one, then the older one.
            ("bp bd ap ap ad", None, Some('a'), MostNodes),
            ("bp bd ap ap ad", Some('b'), Some('a'), MostNodes),
            ("bp bd ap ad", None, Some('b'), Tie),
            ("bp bd ap ad", Some('a'), Some('a'), Tie),
            // A single wrong node that joined first serves nothing next to two nodes of each role.
            ("bd ap ap ad ad", Some('b'), Some('a'), OnlyComplete),
            ("bd ap", None, Some('b'), CanDecode),
            ("bd ap? ap? ad?", None, None, Expecting),
            ("bd ap ap ad?", None, None, Expecting),
            // A smaller group that is usable first does not serve yet: the router waits for a larger one that
            // is being connected.
            ("bp bd ap ap ad?", Some('a'), Some('a'), Expecting),
            ("bp bd ap? ad? ad?", None, None, Expecting),
            ("bp bd ap?", None, Some('b'), OnlyComplete),
            // A rollout of two prefill and two decode nodes replaces prefill nodes first.
            ("ap- ad ap ad", Some('a'), Some('a'), OnlyGroup),
            ("ap ad ad bp", Some('a'), Some('a'), OnlyComplete),
            ("ap- ad ad bp", Some('a'), Some('a'), CanDecode),
            ("ad ad bp bp", Some('a'), Some('a'), CanDecode),
            ("ad- ad bp bp", Some('a'), Some('a'), CanDecode),
            ("ad bp bp bd?", Some('a'), Some('a'), CanDecode),
            ("ad bp bp bd", Some('a'), Some('b'), OnlyComplete),
            ("bp bp bd bd", Some('b'), Some('b'), OnlyGroup),
            // A rollout of two prefill and two decode nodes replaces decode nodes first.
            ("ap ap ad bd", Some('a'), Some('a'), OnlyComplete),
            ("ap ap ad- bd", Some('a'), Some('b'), CanDecode),
            ("ap ap bd bd", Some('b'), Some('b'), CanDecode),
            ("ap bp bd bd", Some('b'), Some('b'), OnlyComplete),
            // A rollout replaces one node of each role at a time: a tie changes nothing, a majority does.
            ("ap ad bp bd", Some('a'), Some('a'), Tie),
            ("ad bp bp bd", Some('a'), Some('b'), OnlyComplete),
            // The serving group has left, or all of it drains, so the other group serves.
            ("bp bd", Some('a'), Some('b'), OnlyGroup),
            ("ap- ad- bp bd", Some('a'), Some('b'), OnlyComplete),
            // The nodes of the serving group are unreachable for a moment, so the router waits for them.
            ("ap? ad? bp bd", Some('a'), Some('a'), Expecting),
            ("ap? ad? bp? bd?", Some('a'), Some('a'), NoneServes),
            ("ap? ad ad bp bd", Some('a'), Some('a'), Expecting),
        ] {
            let found = decided(nodes, before, false, false);
            assert_eq!(found, Decision { in_force: after.map(digest), reason: why }, "{nodes}, {before:?}");
        }
    }

    #[test]
    fn a_group_is_complete_with_a_usable_node_of_each_kind() {
        for (nodes, expected) in [
            ("ap ad bp bd", None),
            ("ap ad bp", Some(Role::Decode)),
            ("ap ad bp bd?", Some(Role::Decode)),
            ("ap ad bd", Some(Role::Prefill)),
            ("ap ad bd bp-", Some(Role::Prefill)),
            // No prefill role is missing, because the model has no prefill nodes or all of them drain.
            ("ad bd", None),
            ("ap- ad bd", None),
            ("ap ad bb", None),
            ("ap ad", Some(Role::Decode)),
        ] {
            let nodes: Vec<GroupNode> = nodes.split_whitespace().enumerate().map(node).collect();
            assert_eq!(missing(&nodes, digest('b')), expected, "{nodes:?}");
        }
    }

    #[test]
    fn nothing_is_chosen_before_nodes_had_time_to_announce_themselves() {
        let settling = Decision { in_force: None, reason: Reason::SettlePeriod };
        assert_eq!(decided("bd", None, true, false), settling);
        let kept = Decision { in_force: Some(digest('a')), reason: Reason::OnlyGroup };
        assert_eq!(decided("ad", Some('a'), true, false), kept, "it was in force before");
    }

    #[test]
    fn patience_has_an_end() {
        let taken = |reason| Decision { in_force: Some(digest('b')), reason };
        assert_eq!(decided("ap? ad? bp bd", Some('a'), false, true), taken(Reason::OnlyComplete));
        assert_eq!(decided("bd ap? ap? ad?", None, false, true), taken(Reason::CanDecode));
    }
}
