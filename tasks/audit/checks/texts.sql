-- Checks of prompts, turns and feedback for text that should not be there. A reader (`texts.py`) returns what a distinct
-- text has, in words that repeat no secret, or an empty string; a pattern is a first filter.

-- check: secrets
-- unit: turn
-- Texts in the form of a well-known kind of key: data sets are copied and kept, and a policy repeats them.
-- before:
create or replace temp table matching as
    select text, secret(text) as kind
    from (select distinct text from texts where regexp_matches(text, getvariable('secret_pattern')));
-- cases:
from cases_in_texts('turn')
-- also problem:
from cases_in_texts('problem')
-- measured:
from measured_in_texts('secrets', 'what looks like a key or a password')

-- check: personal_data
-- unit: turn
-- Texts that have the form and the check digits of personal data, such as addresses and card numbers.
-- before:
create or replace temp table matching as
    select text, personal(text) as kind
    from (select distinct text from texts where regexp_matches(text, getvariable('personal_pattern')));
-- cases:
from cases_in_texts('turn')
-- also problem:
from cases_in_texts('problem')
-- measured:
from measured_in_texts('personal_data', 'what looks like personal data')

-- check: hidden_characters
-- unit: turn
-- Texts with a character that people do not see, or see elsewhere: they then read another text than the policy.
-- before:
create or replace temp table matching as
    select text, hidden(text) as kind
    from (select distinct text from texts where regexp_matches(text, getvariable('hidden_pattern')));
-- cases:
from cases_in_texts('turn')
-- also problem:
from cases_in_texts('problem')
-- measured:
from measured_in_texts('hidden_characters', 'characters that hide or reorder text')
