-- Checks of the store: objects, schemas and parents. `intake` has what was noted while files were fetched.

-- check: damaged_objects
-- unit: object
-- needs: nothing
-- Objects that are missing or differ from their manifests. They are left out of all other checks.
select id, data_set, detail from intake where kind = 'damaged'
-- measured:
select damaged, objects, format('{} of {} objects are missing or damaged', damaged, objects)
    || if(collected > 0, format('; the data of {} data sets were collected by gc', collected), '')
from (
    select cases_of('damaged_objects', 'object') as damaged, getvariable('objects') as objects,
        getvariable('collected') as collected
)

-- check: wrong_schema
-- unit: object
-- needs: nothing
-- Files that are not Parquet, or have a newer or another schema. They are left out of all other checks.
select id, data_set, detail from intake where kind = 'foreign'
-- measured:
select foreigners, objects, format('{} of {} files have an unknown schema', foreigners, objects)
from (select cases_of('wrong_schema', 'object') as foreigners, getvariable('objects') as objects)

-- check: broken_parents
-- unit: object
-- needs: nothing
-- Parents whose manifest is missing or has another hash, and rows that name another policy or problem set.
select id, data_set, detail from intake where kind = 'orphaned'
-- also trajectory:
from other_parents
-- measured:
select orphaned + mismatched, parents, format(
    '{} of {} parents are missing or changed; {} rows name other parents', orphaned, parents, mismatched)
from (
    select cases_of('broken_parents', 'object') as orphaned, cases_of('broken_parents', 'trajectory') as mismatched,
        getvariable('parents') as parents
)
